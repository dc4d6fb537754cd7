"""Write the op schemas as the C++ header `ops_schema.h`: `python -m flint_plugins.codegen OUTPUT`.

CMake runs this, so the plugins interpret exactly what `flint_plugins.ops` says. The types are in
`plugins/trt/schema.h`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flint_plugins.layout import LAYOUT_VERSION
from flint_plugins.ops import DOMAIN, FIELD_SYMBOLS, OPS, VERSION, Binding, Field, FieldValue, Op

_DTYPES = {"bf16": "DType::kBF16", "f32": "DType::kF32", "i32": "DType::kI32", "i8": "DType::kI8"}
_DEFAULTS: dict[str, FieldValue] = {"int": 0, "float": 0.0, "str": ""}
_IDENTIFIER = re.compile(r"[A-Za-z]\w*")


def _symbols() -> list[str]:
    """Every dimension symbol, sorted."""
    found = set(FIELD_SYMBOLS.values())
    for op in OPS.values():
        for binding in (*op.inputs, *op.outputs):
            for dim in binding.shape:
                found |= set(_IDENTIFIER.findall(dim))
        for check in op.checks:
            found |= set(_IDENTIFIER.findall(check))
    return sorted(found)


def _list(items: list[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _value(value: FieldValue) -> str:
    """A C++ FieldValue."""
    if isinstance(value, str):
        return f'FieldValue{{std::string{{"{value}"}}}}'
    return f"FieldValue{{{'float' if isinstance(value, float) else 'int32_t'}{{{value}}}}}"


def _dim(text: str) -> str:
    """A C++ Dim: text, integer factor, divisor, symbols."""
    product, _, divisor = text.partition("/")
    factor, symbols = 1, []
    for part in product.split("*"):
        if part.isdigit():
            factor *= int(part)
        else:
            symbols.append(f"symbol::{part}")
    return f'{{"{text}", {factor}, {divisor or 1}, {_list(symbols)}}}'


def _field(field: Field) -> str:
    symbol = f"symbol::{FIELD_SYMBOLS[field.name]}" if field.name in FIELD_SYMBOLS else "kNO_SYMBOL"
    choices = _list([f'"{choice}"' for choice in field.choices])
    return f'{{"{field.name}", {_value(_DEFAULTS[field.type])}, {choices}, {symbol}}}'


def _binding(op: Op, binding: Binding) -> str:
    mask = ", ".join(_DTYPES[dtype] for dtype in binding.dtypes)
    names = [field.name for field in op.fields]
    when = _list([f"{{{names.index(name)}, {_value(value)}}}" for name, value in binding.when])
    shape = _list([_dim(dim) for dim in binding.shape])
    return f'{{"{binding.name}", maskOf({mask}), {shape}, {when}, "{binding.alias}"}}'


def _check(check: str) -> str:
    """A C++ Check; the equations of `ops.py` are valid C++ once their symbols are variables."""
    symbols = sorted(set(_IDENTIFIER.findall(check)))
    variables = ", ".join(f"{symbol} = s[symbol::{symbol}]" for symbol in symbols)
    return f'{{"{check}", [](Symbols const& s) {{ int64_t const {variables}; return {check}; }}}}'


def _op(op: Op) -> str:
    for output in op.outputs:
        if len(output.dtypes) != 1:
            raise ValueError(f"{op.name}: output {output.name} must have one type")
    parts = [
        [_field(field) for field in op.fields],
        [_binding(op, binding) for binding in op.inputs],
        [_binding(op, binding) for binding in op.outputs],
        [_check(check) for check in op.checks],
    ]
    body = ",\n".join("         {" + ",\n          ".join(part) + "}" for part in parts)
    return f'        {{"{op.name}",\n{body}}}'


def header() -> str:
    """The text of ops_schema.h."""
    symbols = _symbols()
    indices = "\n".join(f"inline constexpr Symbol {symbol} = {index};" for index, symbol in enumerate(symbols))
    names = ", ".join(f'"{symbol}"' for symbol in symbols)
    table = ",\n".join(_op(op) for op in OPS.values())
    return f"""\
// Written by flint_plugins/codegen.py from flint_plugins/ops.py. Do not edit.
#pragma once

#include "trt/schema.h"

namespace flint {{

inline constexpr char const* kNAMESPACE = "{DOMAIN}";
inline constexpr char const* kOP_VERSION = "{VERSION}";
inline constexpr int kLAYOUT_VERSION = {LAYOUT_VERSION};

namespace symbol {{
{indices}
}} // namespace symbol

inline constexpr char const* kSYMBOL_NAMES[] = {{{names}}};
static_assert(std::size(kSYMBOL_NAMES) <= std::tuple_size_v<Symbols>);

inline std::vector<Op> const& allOps() {{
    static std::vector<Op> const ops{{
{table}}};
    return ops;
}}

}} // namespace flint
"""


def main() -> None:
    """Write the header to the path given."""
    output, text = Path(sys.argv[1]), header()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)


if __name__ == "__main__":
    main()
