"""The sandbox of chat templates: a template is a program of a stranger, and one line of it can ask for gigabytes.

jinja's own sandbox keeps a template from the machine, not from its memory. Here what makes much of little is bounded:
products, powers, widths, ranges, and what is printed in all. It is a guard against damage and mistakes; whoever means
harm finds loops that are slow.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sized
from functools import wraps
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Const, Expr, Impossible, TemplateData
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 64 << 20
"""That a template may print: some times the longest context."""
MOST_ITEMS = 10_000_000
"""Of a product of a text or list, and of all ranges of one rendering."""
_MOST_POWER_BITS = 4096
_MOST_WIDTH = 100_000
"""Of a padded text."""
_WIDTH = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\*|\d{6})|\{[^{}]*:[^{}]*(\{|\d{6})")
"""In a format: a width or precision of six digits or more, or one that is computed."""
_SCOPES = ("_loop_vars", "_block_vars")
"""What a call brings for functions that ask for their context, which macros do not."""
_LOOP_NUMBERS = frozenset({"index", "index0", "first", "last", "length"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_FILTERS_WITH_WIDTHS = ("batch", "center", "indent", "round", "slice", "wordwrap")
_METHODS_WITH_WIDTHS = ("center", "expandtabs", "ljust", "rjust", "zfill")


class _CodeGenerator(CodeGenerator):
    """Computes no constant of a template while it compiles it, such as {{ '%999999999d' % 1 }}.

    The environment's option "optimized" leaves that to what is printed.
    """

    def _output_child_to_const(self, node: Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, Const | TemplateData):
            raise Impossible
        return super()._output_child_to_const(node, frame, finalize)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates cannot take much memory. They raise ValueError where they try."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Not optimised: jinja would compute constants such as 'x' * 10**12 while it compiles.
        super().__init__(**options, optimized=False)
        self._ranges = threading.local()
        self.globals["range"] = self._range
        for name in _FILTERS_WITH_WIDTHS:
            self.filters[name] = with_small_widths(self.filters[name])
        self.filters["format"] = _with_small_format(self.filters["format"])

    def begin(self) -> None:
        """A rendering begins, in this thread."""
        self._ranges.items = 0

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or else an item. What long conversations ask thousands of times goes a shorter way."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NUMBERS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation unless its result is too large."""
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or method unless it pads a text beyond measure."""
        if type(__obj) is Macro:  # the template's own: jinja's way takes as long as a short macro
            for name in _SCOPES:
                kwargs.pop(name, None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        if getattr(__obj, "__name__", "") in _METHODS_WITH_WIDTHS:
            _check_numbers((*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What stands for str.format."""
        found = super().wrap_str_format(value)
        return found and _with_small_format(lambda source, *args, **kwargs: found(*args, **kwargs), value.__self__)

    def _range(self, *args: int) -> range:
        found = range(*args)
        self._ranges.items = getattr(self._ranges, "items", 0) + len(found)
        if self._ranges.items > MOST_ITEMS:
            raise ValueError(f"its ranges have more than {MOST_ITEMS:,} items")
        return found


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > _MOST_POWER_BITS:
        raise ValueError("a power in it is too large")


def _check_product(left: Any, right: Any) -> None:
    for many, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(many, Sized) and len(many) * count > MOST_ITEMS:
            raise ValueError(f"a product in it has more than {MOST_ITEMS:,} items")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MOST_POWER_BITS:
        raise ValueError("a product in it is too large")


def _check_format(source: Any) -> None:
    if _WIDTH.search(str(source)):
        raise ValueError("a format in it has a width that is too large or computed")


def _check_numbers(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and value > _MOST_WIDTH for value in values):
        raise ValueError(f"a width in it is above {_MOST_WIDTH:,}")


def with_small_widths(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses large widths; its value may be any number."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[2:], *kwargs.values()) if _takes_context(function) else (*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _takes_context(function: Callable[..., Any]) -> bool:
    return hasattr(function, "jinja_pass_arg")


def _with_small_format(function: Callable[..., str], *source: str) -> Callable[..., str]:
    """A function whose first argument is a format, which may be given here."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> str:
        values = (*source, *args)
        if values:
            _check_format(values[0])
        return function(*values, **kwargs)

    return bounded
