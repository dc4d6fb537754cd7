"""Graph export: every node obeys its op's schema, and the whole reads as documented."""

from __future__ import annotations

import itertools
import time

import numpy as np
import onnx
import pytest

from flint_builder.graph import ONNX_TYPES, export_graph
from flint_builder.weights import weight_files
from flint_plugins.ops import OPS
from flint_runtime.config import ModelConfig
from flint_runtime.executors.step import STEP_ARRAYS, sampling_states
from flint_runtime.manifest import PHASES, Limits, Phase, WeightFormat, ring_tokens
from tests.shapes import FLINT, NANO

LIMITS = Limits(max_batch=8, max_context=4096, prefill_chunk=512)
DIMS = {"T": 5, "B": 2, "B+1": 3, "P": 9, "R": 3, "pages": 20, "slots": 4, "sample_slots": 8}


def export(config: ModelConfig, weights: WeightFormat, phase: Phase) -> onnx.ModelProto:
    files = weight_files(config, weights, "f32", LIMITS.max_context)
    return export_graph(config, weights, files, LIMITS, phase).model


def node_fields(node: onnx.NodeProto) -> dict[str, int | float | str]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.name.startswith("plugin_")}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


@pytest.mark.parametrize(
    ("config", "weights", "phase"), list(itertools.product((NANO, FLINT), ("nvfp4", "bf16"), PHASES))
)
def test_nodes_obey_schemas(config: ModelConfig, weights: WeightFormat, phase: Phase) -> None:
    model = export(config, weights, phase)
    onnx.checker.check_model(model)
    dtype_of = {value: name for name, value in ONNX_TYPES.items()}
    known = {}
    for info in itertools.chain(model.graph.input, model.graph.value_info, model.graph.output):
        tensor = info.type.tensor_type
        shape = tuple(DIMS[d.dim_param] if d.dim_param else d.dim_value for d in tensor.shape.dim)
        known[info.name] = (shape, dtype_of[tensor.elem_type])
    for node in model.graph.node:
        assert node.domain == "flint"
        op, fields = OPS[node.op_type], node_fields(node)
        symbols = op.solve(fields, [known[x][0] for x in node.input], [known[x][1] for x in node.input])
        assert [known[x][0] for x in node.output] == op.output_shapes(fields, symbols), node.name
        assert [known[x][1] for x in node.output] == [b.dtypes[0] for b in op.node_outputs(fields)], node.name


@pytest.mark.parametrize("phase", PHASES)
def test_weights_are_inputs_and_pools_are_aliased(phase: Phase) -> None:
    model = export(NANO, "nvfp4", phase)
    inputs = {i.name for i in model.graph.input}
    outputs = [o.name for o in model.graph.output]
    assert not model.graph.initializer
    weights = {t.name for f in weight_files(NANO, "nvfp4", "f32", 4096) for t in f.tensors}
    assert weights < inputs
    used = {x for node in model.graph.node for x in node.input}
    assert used >= inputs, f"inputs that no node reads: {inputs - used}"
    pools = [f"kv.{i}" for i in range(NANO.num_hidden_layers)]
    assert outputs[:5] == ["logits", "tokens", "logprobs", "top_tokens", "top_logprobs"]
    assert sorted(outputs[5:]) == sorted(f"{p}.out" for p in (*pools, "token_counts", "last_tokens"))
    shapes = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in itertools.chain(model.graph.input, model.graph.output)
    }
    for layer, pool in enumerate(pools):
        tokens, lead = (64, "pages") if NANO.is_full(layer) else (ring_tokens(NANO.sliding_window), "slots")
        assert shapes[pool] == [lead, NANO.num_key_value_heads, 2, tokens, NANO.head_dim]
        assert shapes[f"{pool}.out"] == shapes[pool]


@pytest.mark.parametrize("phase", PHASES)
def test_the_step_and_sampling_states_are_inputs(phase: Phase) -> None:
    """With the names, types and shapes that the runtime feeds them by."""
    numpy_types = {"f32": np.float32, "i32": np.int32}
    names = {value: name for name, value in ONNX_TYPES.items()}
    found = {
        i.name: (numpy_types.get(names[i.type.tensor_type.elem_type]),
                 tuple(d.dim_param or str(d.dim_value) for d in i.type.tensor_type.shape.dim))
        for i in export(FLINT, "nvfp4", phase).graph.input
    }  # fmt: skip
    for name, given in STEP_ARRAYS.items():
        assert found[name] == given, name
    for name, state in sampling_states(FLINT.vocab_size).items():
        assert found[name] == (state.dtype, ("sample_slots", *map(str, state.shape))), name


def test_attention_reads_what_the_projection_wrote() -> None:
    """K/V written in a prefill step are seen in it: the pool (or fresh_kv) passes from NormQkvRope to SinkAttention."""
    nodes = {n.name: n for n in export(NANO, "bf16", "prefill").graph.node}
    for layer in range(NANO.num_hidden_layers):
        qkv, core = nodes[f"layers.{layer}.attn.qkv"], nodes[f"layers.{layer}.attn.core"]
        passed = set(qkv.output) & set(core.input)
        if NANO.is_full(layer):
            assert passed == {f"layers.{layer}.attn.qkv.q", f"kv.{layer}.out"}
        else:
            assert passed == {f"layers.{layer}.attn.qkv.q", f"layers.{layer}.attn.qkv.fresh_kv"}
            assert f"kv.{layer}" in core.input and f"kv.{layer}.out" in core.output


def test_decode_attends_in_one_node() -> None:
    """From the residual stream to the output projection's input; the window only where the layer is sliding."""
    nodes = export(NANO, "bf16", "decode").graph.node
    assert not {"NormQkvRope", "SinkAttention"} & {node.op_type for node in nodes}
    cores = [node for node in nodes if node.op_type == "NormQkvAttention"]
    assert [node.name for node in cores] == [f"layers.{layer}.attn.core" for layer in range(NANO.num_hidden_layers)]
    readers = {name: node for node in nodes for name in node.input}
    for layer, core in enumerate(cores):
        assert f"kv.{layer}" in core.input and f"kv.{layer}.out" in core.output
        assert readers[core.output[0]].name == f"layers.{layer}.attn.out"
        fields = node_fields(core)
        assert fields["has_residual"] == int(layer > 0)
        assert fields["window"] == (0 if NANO.is_full(layer) else NANO.sliding_window)


@pytest.mark.parametrize("phase", PHASES)
def test_rope_only_on_sliding_layers(phase: Phase) -> None:
    layers = []
    for node in export(FLINT, "nvfp4", phase).graph.node:
        if node.op_type in ("NormQkvRope", "NormQkvAttention"):
            layers.append(int(node.name.split(".")[1]))
            assert ("rope" in node.input) == (layers[-1] not in FLINT.full_layers)
    assert layers == list(range(FLINT.num_hidden_layers))


def test_profile_covers_limits() -> None:
    files = weight_files(FLINT, "nvfp4", "f32", 262144)
    limits = Limits(max_batch=64, max_context=262144, prefill_chunk=8192)
    for phase, tokens in (("prefill", 8192), ("decode", 64)):
        profile = export_graph(FLINT, "nvfp4", files, limits, phase).profile  # type: ignore[arg-type]
        assert profile["token_ids"][2] == (tokens,)
        assert profile["page_table"][2] == (64, 4096)
        for low, opt, high in profile.values():
            assert all(a <= b <= c for a, b, c in zip(low, opt, high, strict=True))
        # TensorRT counts elements in 32 bits.
        pages = profile["kv.0"][2]
        assert pages[0] * 4 * 2 * 64 * 128 < 2**31 <= (pages[0] + 1) * 4 * 2 * 64 * 128


def test_full_size_export_is_fast() -> None:
    started = time.monotonic()
    nodes = {phase: len(export(FLINT, "nvfp4", phase).graph.node) for phase in PHASES}
    assert time.monotonic() - started < 10
    assert nodes == {"prefill": 49 * 4 + 3, "decode": 49 * 3 + 3}
