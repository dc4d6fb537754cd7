"""The op schemas: the contract between graph, plugins and executors, and the only place it is written.

The graph export places nodes by these schemas, the reference executor checks its tensors against them, and
`flint_plugins.codegen` turns them into the C++ tables that the TensorRT plugins interpret. Activations are
token-packed: T tokens of B sequences stand behind one another, sequence b owning rows query_start[b] to
query_start[b + 1].

A dimension is a product of symbols and integers, optionally divided by one integer: "T", "Hq*D", "9*H", "2*I/16".
Symbols:

    T tokens           B sequences       B1 = B + 1            R rows of logits     V vocabulary
    H hidden size      I intermediate    S shared intermediate E experts            N, K rows and columns of a weight
    Hq query heads     Hkv KV heads      D head dimension      C rows of the RoPE table
    P page-table width G pages           L sliding slots       W tokens of a ring   Q sampling slots

Packed weights: see `flint_plugins.layout`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

DOMAIN = "flint"
VERSION = "1"

DType = Literal["bf16", "f32", "i32", "i8"]
FieldValue = int | float | str
Condition = tuple[str, FieldValue]

PAGE_TOKENS = 64
"""Tokens of one page of the global KV pool."""
MAX_LOGPROBS = 20
"""Alternatives that Sample reports per row."""
MASK_TOKENS = 32
"""Tokens of one word of token_mask; the vocabulary is whole words."""
USE_BIAS, USE_MASK = 1, 2
"""Bits of sample_flags."""


class SchemaError(ValueError):
    """A node's fields, types or shapes contradict its op's schema."""


@dataclass(frozen=True)
class Field:
    """A plugin field (an ONNX attribute). `choices` restricts a string field."""

    name: str
    type: Literal["int", "float", "str"]
    doc: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binding:
    """An input or output of an op; it exists where every condition of `when` holds."""

    name: str
    dtypes: tuple[DType, ...]
    shape: tuple[str, ...]
    when: tuple[Condition, ...] = ()
    alias: str = ""
    """Of an output: the input whose memory it shares."""

    def present(self, fields: Mapping[str, FieldValue]) -> bool:
        """Whether a node with these field values has the binding."""
        return all(fields[name] == value for name, value in self.when)


@dataclass(frozen=True)
class Op:
    """One plugin: its fields, bindings, and equations between symbols (valid Python and C++)."""

    name: str
    doc: str
    fields: tuple[Field, ...]
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    checks: tuple[str, ...] = ()

    def node_inputs(self, fields: Mapping[str, FieldValue]) -> list[Binding]:
        """The inputs of a node with these field values, in order."""
        return [b for b in self.inputs if b.present(fields)]

    def node_outputs(self, fields: Mapping[str, FieldValue]) -> list[Binding]:
        """The outputs of a node with these field values, in order."""
        return [b for b in self.outputs if b.present(fields)]

    def check_fields(self, fields: Mapping[str, FieldValue]) -> None:
        """Raise SchemaError unless `fields` holds exactly the op's fields, each of its type."""
        expected, found = {f.name for f in self.fields}, set(fields)
        if expected != found:
            raise SchemaError(
                f"{self.name}: missing fields {sorted(expected - found)}, unknown fields {sorted(found - expected)}"
            )
        for field in self.fields:
            value = fields[field.name]
            python_type = {"int": int, "float": float, "str": str}[field.type]
            if type(value) is not python_type:
                raise SchemaError(f"{self.name}: field {field.name} must be {field.type}, found {value!r}")
            if field.choices and value not in field.choices:
                raise SchemaError(f"{self.name}: field {field.name} must be one of {field.choices}, found {value!r}")

    def solve(
        self,
        fields: Mapping[str, FieldValue],
        shapes: Iterable[tuple[int, ...]],
        dtypes: Iterable[str],
    ) -> dict[str, int]:
        """Check a node's inputs against the schema and return the value of every symbol.

        Args:
            fields: the node's field values.
            shapes, dtypes: of its inputs, in order.
        Raises:
            SchemaError: naming the binding, what was expected and what was found.
        """
        self.check_fields(fields)
        bindings = self.node_inputs(fields)
        shapes, dtypes = list(shapes), list(dtypes)
        if len(shapes) != len(bindings):
            names = [b.name for b in bindings]
            raise SchemaError(f"{self.name}: expected {len(bindings)} inputs {names}, found {len(shapes)}")
        symbols = {s: int(fields[f]) for f, s in FIELD_SYMBOLS.items() if f in fields}
        pending: list[tuple[Binding, tuple[int, ...], str, int]] = []
        for binding, shape, dtype in zip(bindings, shapes, dtypes, strict=True):
            if dtype not in binding.dtypes:
                wanted = " or ".join(binding.dtypes)
                raise SchemaError(f"{self.name}: input {binding.name} must be {wanted}, found {dtype}")
            if len(shape) != len(binding.shape):
                raise SchemaError(f"{self.name}: input {binding.name} must be {binding.shape}, found {shape}")
            pending += [(binding, shape, dim, size) for dim, size in zip(binding.shape, shape, strict=True)]
        # Dimensions may depend on symbols that a later input binds: go round until nothing is unknown.
        while pending:
            rest = []
            for item in pending:
                binding, shape, dim, size = item
                factor, divisor, unknown = split_dim(dim, symbols)
                if not unknown:
                    if size * divisor != factor:
                        raise SchemaError(
                            f"{self.name}: input {binding.name} {list(shape)} does not match {list(binding.shape)}:"
                            f" {dim} = {factor / divisor:g}"
                        )
                elif len(unknown) == 1 and (size * divisor) % factor == 0:
                    symbols[unknown[0]] = size * divisor // factor
                elif len(unknown) == 1:
                    raise SchemaError(f"{self.name}: input {binding.name} {list(shape)}: {dim} is not whole")
                else:
                    rest.append(item)
            if len(rest) == len(pending):
                raise SchemaError(f"{self.name}: cannot derive {[item[2] for item in rest]}")
            pending = rest
        for check in self.checks:
            if not eval(check, {"__builtins__": {}}, symbols):  # noqa: S307 (our own constants, above)
                raise SchemaError(f"{self.name}: {check} does not hold for {symbols}")
        return symbols

    def output_shapes(self, fields: Mapping[str, FieldValue], symbols: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Shapes of a node's outputs, in order, from the symbols that `solve` found."""
        shapes = []
        for binding in self.node_outputs(fields):
            shape = []
            for dim in binding.shape:
                factor, divisor, unknown = split_dim(dim, symbols)
                assert not unknown and factor % divisor == 0, (self.name, binding, symbols)
                shape.append(factor // divisor)
            shapes.append(tuple(shape))
        return shapes


def split_dim(dim: str, symbols: Mapping[str, int]) -> tuple[int, int, list[str]]:
    """Split a dimension into (product of its known factors, divisor, unknown symbols)."""
    product, _, divisor = dim.partition("/")
    known, unknown = [], []
    for factor in product.split("*"):
        if re.fullmatch(r"\d+", factor):
            known.append(int(factor))
        elif factor in symbols:
            known.append(symbols[factor])
        else:
            unknown.append(factor)
    return math.prod(known), int(divisor or 1), unknown


FIELD_SYMBOLS = {"num_heads": "Hq", "num_kv_heads": "Hkv", "head_dim": "D"}
"""Fields that fix a symbol."""

NVFP4: Condition = ("weights", "nvfp4")
BF16: Condition = ("weights", "bf16")
FULL: Condition = ("attention", "full")
SLIDING: Condition = ("attention", "sliding")
PREFILL: Condition = ("phase", "prefill")
DECODE: Condition = ("phase", "decode")
RESIDUAL: Condition = ("has_residual", 1)

WEIGHTS = Field("weights", "str", "format of the packed weights", ("nvfp4", "bf16"))
EPS = Field("eps", "float", "RMSNorm epsilon")
ATTENTION = Field(
    "attention", "str", "full: every earlier token, no positions; sliding: window and RoPE", ("full", "sliding")
)
PHASE = Field("phase", "str", "graph that the node stands in", ("prefill", "decode"))
HAS_RESIDUAL = Field("has_residual", "int", "0 at the first layer, whose delta is the embedding")
WINDOW = Field("window", "int", "keys that a query of a sliding layer sees, itself included; 0 in full layers")
HEADS = Field("num_heads", "int", "query heads")
KV_HEADS = Field("num_kv_heads", "int", "KV heads")
HEAD_DIM = Field("head_dim", "int", "head dimension")


def _packed(
    name: str, rows: str, columns: str, scale: tuple[str, ...], lead: tuple[str, ...] = ()
) -> tuple[Binding, ...]:
    """A packed [rows, columns] weight in both formats; NVFP4 adds its FP32 tensor scales."""
    return (
        Binding(name, ("i8",), (*lead, f"{rows}/16", f"9*{columns}"), (NVFP4,)),
        Binding(name, ("bf16",), (*lead, f"{rows}/16", f"16*{columns}"), (BF16,)),
        Binding(f"{name}_scale", ("f32",), (*lead, *scale), (NVFP4,)),
    )


_STREAM = (Binding("delta", ("bf16",), ("T", "H")), Binding("residual", ("bf16",), ("T", "H")))
_NORM = Binding("norm", ("f32",), ("H",))
_QKV_INPUTS = (
    _STREAM[0],
    Binding("residual", ("bf16",), ("T", "H"), (RESIDUAL,)),
    _NORM,
    *_packed("qkv", "N", "H", ("3",)),
    Binding("q_norm", ("f32",), ("D",)),
    Binding("k_norm", ("f32",), ("D",)),
    Binding("rope", ("f32",), ("C", "D"), (SLIDING,)),
)
_SINKS = Binding("sinks", ("f32",), ("Hq",))
_POSITIONS = Binding("positions", ("i32",), ("T",))
_QUERY_START = Binding("query_start", ("i32",), ("B1",))
_SEQ_LENS = Binding("seq_lens", ("i32",), ("B",))
_PAGE_TABLE = Binding("page_table", ("i32",), ("B", "P"), (FULL,))
_RING_SLOT = Binding("ring_slot", ("i32",), ("B",), (SLIDING,))
_PAGES = ("G", "Hkv", "2", str(PAGE_TOKENS), "D")
_RINGS = ("L", "Hkv", "2", "W", "D")
_ATTENTION_CHECKS = ("B1 == B + 1", "Hq % Hkv == 0")
_QKV_ROWS = "N == (Hq + 2 * Hkv) * D"
_MLP_OUT = (Binding("out", ("bf16",), ("T", "H")), Binding("residual_out", ("bf16",), ("T", "H")))

_OPS = (
    Op(
        "Embedding",
        "out[t] = table[token], where token = token_ids[t], or last_tokens[-1 - token_ids[t]] if that is negative: so "
        "a step can be prepared before the tokens that the one before it draws are known. A token outside [0, V) and a "
        "slot outside [0, Q) give NaN.",
        (),
        (
            Binding("token_ids", ("i32",), ("T",)),
            Binding("last_tokens", ("i32",), ("Q",)),
            Binding("table", ("bf16",), ("V", "H")),
        ),
        (Binding("out", ("bf16",), ("T", "H")),),
    ),
    Op(
        "NormQkvRope",
        "Residual add, RMSNorm, QKV projection, per-head q/k norm, RoPE on sliding layers. K and V go to the pool, "
        "except in a sliding layer's prefill: there they go to fresh_kv, because a chunk longer than the ring would "
        "overwrite keys that its own first tokens still see.",
        (WEIGHTS, EPS, HAS_RESIDUAL, ATTENTION, PHASE, HEADS, KV_HEADS, HEAD_DIM),
        (
            *_QKV_INPUTS,
            _POSITIONS,
            Binding("query_start", ("i32",), ("B1",), (FULL,)),
            _PAGE_TABLE,
            Binding("kv_pool", ("bf16",), _PAGES, (FULL,)),
            Binding("query_start", ("i32",), ("B1",), (SLIDING, DECODE)),
            Binding("ring_slot", ("i32",), ("B",), (SLIDING, DECODE)),
            Binding("kv_pool", ("bf16",), _RINGS, (SLIDING, DECODE)),
        ),
        (
            Binding("q", ("bf16",), ("T", "Hq", "D")),
            Binding("residual_out", ("bf16",), ("T", "H"), (RESIDUAL,)),
            Binding("kv_pool_out", ("bf16",), _PAGES, (FULL,), "kv_pool"),
            Binding("kv_pool_out", ("bf16",), _RINGS, (SLIDING, DECODE), "kv_pool"),
            Binding("fresh_kv", ("bf16",), ("T", "2", "Hkv", "D"), (SLIDING, PREFILL)),
        ),
        (_QKV_ROWS,),
    ),
    Op(
        "SinkAttention",
        "Causal attention with one learned sink logit per query head. Full layers read the paged pool, sliding "
        "layers the ring; in a sliding layer's prefill also fresh_kv, whose last tokens it then leaves in the ring.",
        (ATTENTION, PHASE, WINDOW, KV_HEADS),
        (
            Binding("q", ("bf16",), ("T", "Hq", "D")),
            _SINKS,
            _POSITIONS,
            _QUERY_START,
            _SEQ_LENS,
            _PAGE_TABLE,
            Binding("kv_pool", ("bf16",), _PAGES, (FULL,)),
            _RING_SLOT,
            Binding("kv_pool", ("bf16",), _RINGS, (SLIDING,)),
            Binding("fresh_kv", ("bf16",), ("T", "2", "Hkv", "D"), (SLIDING, PREFILL)),
        ),
        (
            Binding("out", ("bf16",), ("T", "Hq*D")),
            Binding("kv_pool_out", ("bf16",), _RINGS, (SLIDING, PREFILL), "kv_pool"),
        ),
        _ATTENTION_CHECKS,
    ),
    Op(
        "NormQkvAttention",
        "NormQkvRope and SinkAttention of a decode step in one, so that what stands between them need not be a pass of "
        "its own. Decode graphs have it; the two ops keep their decode form, for they are the parts that it is made "
        "of, are tested one by one, and stand in the decode graphs of engines of format 1.",
        (WEIGHTS, EPS, HAS_RESIDUAL, ATTENTION, WINDOW, HEADS, KV_HEADS, HEAD_DIM),
        (
            *_QKV_INPUTS,
            _SINKS,
            _POSITIONS,
            _QUERY_START,
            _SEQ_LENS,
            _PAGE_TABLE,
            Binding("kv_pool", ("bf16",), _PAGES, (FULL,)),
            _RING_SLOT,
            Binding("kv_pool", ("bf16",), _RINGS, (SLIDING,)),
        ),
        (
            Binding("out", ("bf16",), ("T", "Hq*D")),
            Binding("residual_out", ("bf16",), ("T", "H"), (RESIDUAL,)),
            Binding("kv_pool_out", ("bf16",), _PAGES, (FULL,), "kv_pool"),
            Binding("kv_pool_out", ("bf16",), _RINGS, (SLIDING,), "kv_pool"),
        ),
        (_QKV_ROWS, *_ATTENTION_CHECKS),
    ),
    Op(
        "Linear",
        "y = x W^T",
        (WEIGHTS,),
        (Binding("x", ("bf16",), ("T", "K")), *_packed("weight", "N", "K", ("1",))),
        (Binding("y", ("bf16",), ("T", "N")),),
    ),
    Op(
        "NormMlp",
        "Residual add, RMSNorm, dense SwiGLU",
        (WEIGHTS, EPS),
        (*_STREAM, _NORM, *_packed("gate_up", "2*I", "H", ("2",)), *_packed("down", "H", "I", ("1",))),
        _MLP_OUT,
    ),
    Op(
        "NormMoe",
        "Residual add, RMSNorm, router, top-k routed experts, shared expert, combine",
        (WEIGHTS, EPS, Field("top_k", "int", "experts per token")),
        (
            *_STREAM,
            _NORM,
            Binding("router", ("bf16", "f32"), ("E", "H")),
            *_packed("experts_gate_up", "2*I", "H", ("2",), ("E",)),
            *_packed("experts_down", "H", "I", (), ("E",)),
            *_packed("shared_gate_up", "2*S", "H", ("2",)),
            *_packed("shared_down", "H", "S", ("1",)),
        ),
        _MLP_OUT,
    ),
    Op(
        "LmHead",
        "Final residual add, RMSNorm and logits of the rows asked for",
        (WEIGHTS, EPS),
        (*_STREAM, _NORM, *_packed("weight", "V", "H", ("1",)), Binding("logits_rows", ("i32",), ("R",))),
        (Binding("logits", ("f32",), ("R", "V")),),
    ),
    Op(
        "Sample",
        "Bias, mask, penalties, temperature, top-k, top-p, min-p, a seeded draw and logprobs, per row of logits. "
        "temperature 0 is greedy; top_k <= 0, top_p >= 1 and min_p <= 0 are off. A row uses the states of its "
        "sample_slot (-1: of none): token_counts[slot][v] holds the times v was generated, plus 2**30 where v is in "
        "the prompt; logit_bias[slot] is added to the logits if sample_flags has USE_BIAS; bit v % 32 of word v / 32 "
        "of token_mask[slot] must be set for v to be drawn if it has USE_MASK. The drawn token is counted, and kept in "
        "last_tokens, in place. forced_token >= 0: this token and its logprob are the row's result, and no state "
        "changes; -1: draw.",
        (),
        (
            Binding("logits", ("f32",), ("R", "V")),
            Binding("temperature", ("f32",), ("R",)),
            Binding("top_k", ("i32",), ("R",)),
            Binding("top_p", ("f32",), ("R",)),
            Binding("min_p", ("f32",), ("R",)),
            Binding("repetition_penalty", ("f32",), ("R",)),
            Binding("presence_penalty", ("f32",), ("R",)),
            Binding("frequency_penalty", ("f32",), ("R",)),
            Binding("seed", ("i32",), ("R", "2")),
            Binding("draw_index", ("i32",), ("R",)),
            Binding("forced_token", ("i32",), ("R",)),
            Binding("sample_flags", ("i32",), ("R",)),
            Binding("sample_slot", ("i32",), ("R",)),
            Binding("token_counts", ("i32",), ("Q", "V")),
            Binding("last_tokens", ("i32",), ("Q",)),
            Binding("logit_bias", ("f32",), ("Q", "V")),
            Binding("token_mask", ("i32",), ("Q", f"V/{MASK_TOKENS}")),
        ),
        (
            Binding("tokens", ("i32",), ("R",)),
            Binding("logprobs", ("f32",), ("R",)),
            Binding("top_tokens", ("i32",), ("R", str(MAX_LOGPROBS))),
            Binding("top_logprobs", ("f32",), ("R", str(MAX_LOGPROBS))),
            Binding("token_counts_out", ("i32",), ("Q", "V"), (), "token_counts"),
            Binding("last_tokens_out", ("i32",), ("Q",), (), "last_tokens"),
        ),
        (f"V >= {MAX_LOGPROBS}",),
    ),
)

OPS: dict[str, Op] = {op.name: op for op in _OPS}
