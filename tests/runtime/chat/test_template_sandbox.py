"""What the sandbox does a shorter way comes out as jinja's own sandbox has it."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flint_runtime.chat.template_sandbox import TemplateSandbox

MACRO = "{% macro m(a, b='<') %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller else '' }}]{% endmacro %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ d.a }}{{ d.b.c }}{{ d.none is none }}{{ d.missing is undefined }}{{ d.missing }}{{ d[1] }}",
        "{{ d['keys'] }}{{ d.items() | list }}{{ d.get('a') }}{{ d.keys is callable }}",
        "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
        "{% for x in l %}{{ loop.missing is undefined }}{{ loop.previtem }}{{ loop.cycle(1, 2) }}{% endfor %}",
        MACRO + "{{ m(1) }}{{ m(1, 2, 3, x=4) }}{{ m(a='<b>') }}",
        MACRO + "{% call m(1) %}inner <{% endcall %}{% for x in l %}{{ m(x) }}{% endfor %}",
        MACRO + "{% autoescape true %}{{ m('<b>') }}{{ '<i>' }}{% endautoescape %}{{ m('<b>') }}",
        MACRO + "{% set f = m %}{{ f('x') }}{{ m('x') | upper }}{{ m.name }}{{ m.arguments }}",
        MACRO + "{{ m(1, 2, b=3) }}",
        "{{ d.__class__ }}{{ d.a.__class__.__mro__ }}",
        "{{ d.pop('a') }}",
        "{% macro m() %}{{ m.__call__ }}{% endmacro %}{{ m() }}",
        "{{ d.missing.more }}",
    ],
)
def test_short_ways_are_as_the_library_s(source: str) -> None:
    def outcome(environment: type[ImmutableSandboxedEnvironment]) -> str:
        data: dict[str, Any] = {
            "d": {"a": "<1>", "b": {"c": 2}, "none": None, 1: "one", "keys": "k"},
            "l": ["p", "<q>"],
        }
        try:
            return environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render(data)
        except Exception as error:  # the same kind of error, then
            return f"{type(error).__name__}: {error}"

    assert outcome(TemplateSandbox) == outcome(ImmutableSandboxedEnvironment)


@pytest.mark.parametrize(
    "expression", ["d.__class__.__mro__", "loop.__init__.__globals__", "m.__call__.__globals__['os']", "d.pop('a')"]
)
def test_private_parts_stay_out_of_reach(expression: str) -> None:
    source = f"{{% macro m() %}}{{% endmacro %}}{{% for x in [1] %}}{{{{ {expression} }}}}{{% endfor %}}"
    with pytest.raises(SecurityError):
        TemplateSandbox().from_string(source).render(d={"a": 1})
