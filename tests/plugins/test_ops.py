"""The op schemas: what solve derives, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_plugins.ops import FIELD_SYMBOLS, MASK_TOKENS, MAX_LOGPROBS, OPS, FieldValue, Op, SchemaError
from tests.plugins.nodes import SYMBOLS, combinations, label, shape, symbols_of

CASES = list(combinations())
NODES = pytest.mark.parametrize(("op", "fields"), CASES, ids=[label(*case) for case in CASES])


@st.composite
def sized_nodes(draw: st.DrawFn) -> tuple[Op, dict[str, FieldValue], dict[str, int]]:
    """A node, and a size for every symbol that satisfies its op's equations."""
    op, fields = draw(st.sampled_from(CASES))
    sizes = {symbol: draw(st.integers(1, 40)) for symbol in SYMBOLS}
    for symbol in ("H", "I", "S", "K", "D"):
        sizes[symbol] *= 64
    sizes["V"] = sizes["N"] = MASK_TOKENS * draw(st.integers(-(-MAX_LOGPROBS // MASK_TOKENS), 20))
    sizes["B1"] = sizes["B"] + 1
    sizes["Hq"] *= sizes["Hkv"]
    if op.name in ("NormQkvRope", "NormQkvAttention"):
        sizes["N"] = (sizes["Hq"] + 2 * sizes["Hkv"]) * sizes["D"]
    fields = fields | {name: sizes[symbol] for name, symbol in FIELD_SYMBOLS.items() if name in fields}
    return op, fields, sizes


def solve(op: Op, fields: dict[str, FieldValue], shapes: list[tuple[int, ...]]) -> dict[str, int]:
    return op.solve(fields, shapes, [b.dtypes[0] for b in op.node_inputs(fields)])


@settings(max_examples=300, deadline=None)
@given(sized_nodes())
def test_solve_recovers_the_sizes(node: tuple[Op, dict[str, FieldValue], dict[str, int]]) -> None:
    op, fields, sizes = node
    found = solve(op, fields, [shape(b, sizes) for b in op.node_inputs(fields)])
    assert found == {symbol: sizes[symbol] for symbol in found}
    assert op.output_shapes(fields, found) == [shape(b, sizes) for b in op.node_outputs(fields)]


@settings(max_examples=300, deadline=None)
@given(sized_nodes(), st.data())
def test_another_dimension_is_refused_or_explained(
    node: tuple[Op, dict[str, FieldValue], dict[str, int]], data: st.DataObject
) -> None:
    """After one dimension of one input changed, solve raises, or its symbols give exactly the shapes it was shown."""
    op, fields, sizes = node
    bindings = op.node_inputs(fields)
    shapes = [shape(b, sizes) for b in bindings]
    index = data.draw(st.sampled_from([i for i, s in enumerate(shapes) if s]))
    axis = data.draw(st.integers(0, len(shapes[index]) - 1))
    changed = list(shapes[index])
    changed[axis] += data.draw(st.sampled_from([-1, 1, 5, changed[axis]]))
    shapes[index] = tuple(changed)
    try:
        found = solve(op, fields, shapes)
    except SchemaError as error:
        assert op.name in str(error)
        return
    assert [shape(b, found) for b in bindings] == shapes


@NODES
def test_wrong_types_counts_and_ranks_name_the_binding(op: Op, fields: dict[str, FieldValue]) -> None:
    bindings = op.node_inputs(fields)
    shapes, dtypes = [shape(b) for b in bindings], [b.dtypes[0] for b in bindings]
    for i, binding in enumerate(bindings):
        wrong = next(d for d in ("bf16", "i8") if d not in binding.dtypes)
        with pytest.raises(SchemaError, match=rf"{op.name}: input {binding.name} must be .*, found {wrong}"):
            op.solve(fields, shapes, [*dtypes[:i], wrong, *dtypes[i + 1 :]])
        with pytest.raises(SchemaError, match=f"{op.name}: input {binding.name} must be "):
            op.solve(fields, [*shapes[:i], (*shapes[i], 1), *shapes[i + 1 :]], dtypes)
    with pytest.raises(SchemaError, match=f"expected {len(bindings)} inputs"):
        op.solve(fields, shapes[:-1], dtypes[:-1])


@NODES
def test_wrong_fields_are_named(op: Op, fields: dict[str, FieldValue]) -> None:
    with pytest.raises(SchemaError, match=r"unknown fields \['junk'\]"):
        op.check_fields(fields | {"junk": 1})
    for field in op.fields:
        with pytest.raises(SchemaError, match=rf"missing fields \['{field.name}'\]"):
            op.check_fields({k: v for k, v in fields.items() if k != field.name})
        with pytest.raises(SchemaError, match=f"field {field.name} must be {field.type}"):
            op.check_fields(fields | {field.name: None})  # type: ignore[arg-type]
        if field.choices:
            with pytest.raises(SchemaError, match=f"field {field.name} must be one of"):
                op.check_fields(fields | {field.name: "neither"})


@NODES
def test_every_output_follows_from_the_inputs(op: Op, fields: dict[str, FieldValue]) -> None:
    inputs = {b.name: b for b in op.node_inputs(fields)}
    assert len(inputs) == len(op.node_inputs(fields)), "a node's inputs have distinct names"
    for output in op.node_outputs(fields):
        assert len(output.dtypes) == 1
        if output.alias:
            assert output.shape == inputs[output.alias].shape
            assert output.dtypes == inputs[output.alias].dtypes


def test_equations_between_symbols_are_checked() -> None:
    op = OPS["SinkAttention"]
    fields: dict[str, FieldValue] = {"attention": "full", "phase": "decode", "window": 0, "num_kv_heads": 2}
    bindings = op.node_inputs(fields)
    with pytest.raises(SchemaError, match=r"B1 == B \+ 1 does not hold"):
        solve(op, fields, [shape(b, SYMBOLS | {"B1": 4}) for b in bindings])
    with pytest.raises(SchemaError, match="Hq % Hkv == 0 does not hold"):
        solve(op, fields, [shape(b, SYMBOLS | {"Hq": 5}) for b in bindings])


def test_the_op_of_decode_binds_what_its_parts_bind() -> None:
    """But for q, which passes between them."""
    op, parts = OPS["NormQkvAttention"], (OPS["NormQkvRope"], OPS["SinkAttention"])
    for weights, attention, has_residual in itertools.product(("nvfp4", "bf16"), ("full", "sliding"), (0, 1)):
        values: dict[str, FieldValue] = {
            "weights": weights, "eps": 1e-6, "has_residual": has_residual, "attention": attention, "phase": "decode",
            "window": 33, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        }  # fmt: skip
        for side in ("node_inputs", "node_outputs"):
            whole, *of_parts = (
                {b.name: b for b in getattr(o, side)({f.name: values[f.name] for f in o.fields})} for o in (op, *parts)
            )
            merged = of_parts[0] | of_parts[1]
            del merged["q"]
            assert {n: (b.dtypes, b.shape, b.alias) for n, b in whole.items()} == {
                n: (b.dtypes, b.shape, b.alias) for n, b in merged.items()
            }


def test_a_vocabulary_of_no_whole_mask_words_is_refused() -> None:
    op = OPS["Sample"]
    shapes = [shape(b) for b in op.inputs]
    wrong = [tuple(SYMBOLS["V"] + 1 if dim == "V" else n for dim, n in zip(b.shape, s, strict=True))
             for b, s in zip(op.inputs, shapes, strict=True)]  # fmt: skip
    with pytest.raises(SchemaError, match=r"Sample: input token_mask \[2, 2\] does not match .*: V/32 = 2\.03125"):
        solve(op, {}, wrong)


def test_the_test_sizes_cover_every_symbol() -> None:
    for op in OPS.values():
        assert symbols_of(op) <= SYMBOLS.keys()
