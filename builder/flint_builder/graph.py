"""Graph export: the prefill and the decode graph of an engine, made of plugin nodes only.

Weights, step metadata and KV pools are graph inputs, so a graph holds no data and exports in well under a second.
Every state that a step changes is also a graph output under its aliased name (`kv.3` -> `kv.3.out`): the runtime binds
both to one address.

Graph inputs, besides the weights of `flint_builder.weights` (dtype int32 unless said otherwise):

    token_ids [T]       query_start [B+1]   page_table [B, P]    logits_rows [R]
    positions [T]       seq_lens [B]        ring_slot [B]
    per row of logits, [R]: temperature, top_p, min_p, {repetition,presence,frequency}_penalty (float32),
    top_k, seed [R, 2], draw_index, forced_token, sample_flags, sample_slot
    states: kv.{layer} (bfloat16; paged or ring), and per sample slot token_counts [slots, V], last_tokens [slots],
    logit_bias [slots, V] (float32), token_mask [slots, V/32]

Graph outputs: logits [R, V] float32, tokens [R], logprobs [R], top_tokens and top_logprobs [R, 20], and the states
but logit_bias and token_mask, which no node writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from flint_builder.weights import EngineTensor, WeightFile
from flint_plugins.ops import DOMAIN, MASK_TOKENS, MAX_LOGPROBS, OPS, PAGE_TOKENS, VERSION, Binding, DType, FieldValue
from flint_runtime.config import ModelConfig
from flint_runtime.executors.host_graph import size_ranges
from flint_runtime.manifest import Limits, Phase, WeightFormat, ring_tokens

ONNX_TYPES: dict[DType, int] = {
    "bf16": onnx.TensorProto.BFLOAT16,
    "f32": onnx.TensorProto.FLOAT,
    "i32": onnx.TensorProto.INT32,
    "i8": onnx.TensorProto.INT8,
}
ONNX_OPSET = 21
ONNX_IR_VERSION = 10

Dim = int | str
Shape = tuple[Dim, ...]
Profile = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Optimization profile: input name -> (min, opt, max) shape."""

_SAMPLING_INPUTS: dict[str, tuple[DType, Shape]] = {
    "temperature": ("f32", ("R",)),
    "top_k": ("i32", ("R",)),
    "top_p": ("f32", ("R",)),
    "min_p": ("f32", ("R",)),
    "repetition_penalty": ("f32", ("R",)),
    "presence_penalty": ("f32", ("R",)),
    "frequency_penalty": ("f32", ("R",)),
    "seed": ("i32", ("R", 2)),
    "draw_index": ("i32", ("R",)),
    "forced_token": ("i32", ("R",)),
    "sample_flags": ("i32", ("R",)),
    "sample_slot": ("i32", ("R",)),
}


@dataclass(frozen=True)
class ExportedGraph:
    """An ONNX model and the optimization profile that covers what its phase may be asked."""

    model: onnx.ModelProto
    profile: Profile


def export_graph(
    config: ModelConfig,
    weights: WeightFormat,
    files: tuple[WeightFile, ...],
    limits: Limits,
    phase: Phase,
) -> ExportedGraph:
    """Export one of an engine's two graphs.

    Args:
        files: the engine's weight files, whose tensors become inputs.
    Raises:
        onnx.checker.ValidationError, AssertionError: a bug of ours.
    """
    export = _Export(config, weights, files, phase)
    export.build()
    graph = gs.Graph(
        nodes=export.nodes,
        inputs=list(export.inputs.values()),
        outputs=export.outputs,
        name=f"flint-{phase}",
        opset=ONNX_OPSET,
        import_domains=[onnx.helper.make_opsetid("", ONNX_OPSET), onnx.helper.make_opsetid(DOMAIN, int(VERSION))],
    )
    model = gs.export_onnx(graph, do_type_check=False, ir_version=ONNX_IR_VERSION, producer_name="flint-builder")
    onnx.checker.check_model(model)
    return ExportedGraph(model, _profile(export, limits, phase))


class _Export:
    """Builds the node list of one graph."""

    def __init__(self, config: ModelConfig, weights: WeightFormat, files: tuple[WeightFile, ...], phase: Phase) -> None:
        self.config, self.weights, self.phase = config, weights, phase
        self.nodes: list[gs.Node] = []
        self.outputs: list[gs.Variable] = []
        self.inputs: dict[str, gs.Variable] = {}
        pools: dict[str, tuple[DType, Shape]] = {}
        for layer in range(config.num_hidden_layers):
            slots: Shape = ("pages",) if config.is_full(layer) else ("slots",)
            tokens = PAGE_TOKENS if config.is_full(layer) else ring_tokens(config.sliding_window)
            pools[f"kv.{layer}"] = ("bf16", (*slots, config.num_key_value_heads, 2, tokens, config.head_dim))
        metadata: dict[str, tuple[DType, Shape]] = {
            "token_ids": ("i32", ("T",)),
            "positions": ("i32", ("T",)),
            "query_start": ("i32", ("B+1",)),
            "seq_lens": ("i32", ("B",)),
            "page_table": ("i32", ("B", "P")),
            "ring_slot": ("i32", ("B",)),
            "logits_rows": ("i32", ("R",)),
        }
        if not config.full_layers:
            del metadata["page_table"]
        if not config.sliding_layers:
            del metadata["ring_slot"]
        states: dict[str, tuple[DType, Shape]] = {
            "token_counts": ("i32", ("sample_slots", config.vocab_size)),
            "last_tokens": ("i32", ("sample_slots",)),
            "logit_bias": ("f32", ("sample_slots", config.vocab_size)),
            "token_mask": ("i32", ("sample_slots", config.vocab_size // MASK_TOKENS)),
        }
        for name, (dtype, shape) in {**metadata, **_SAMPLING_INPUTS, **pools, **states}.items():
            self._add_input(name, dtype, shape)
        self.weight_tensors: dict[str, EngineTensor] = {t.name: t for file in files for t in file.tensors}
        for tensor in self.weight_tensors.values():
            self._add_input(tensor.name, tensor.dtype, tensor.shape)

    def _add_input(self, name: str, dtype: DType, shape: Shape) -> None:
        self.inputs[name] = gs.Variable(name, dtype=ONNX_TYPES[dtype], shape=shape)

    def build(self) -> None:
        """Lay the nodes from the token ids to the sampled tokens."""
        c = self.config
        embedding = self._node("Embedding", "embedding", {}, {"table": "embedding"}, {"out": ("T", c.hidden_size)})
        delta, residual = embedding["out"], embedding["out"]
        for layer in range(c.num_hidden_layers):
            delta, residual = self._layer(layer, delta, residual)
        stream = {"delta": delta, "residual": residual, "norm": "head.norm", **self._packed("weight", "head")}
        head = self._node(
            "LmHead", "head", {**self._eps}, stream, {"logits": ("R", c.vocab_size)}, {"logits": "logits"}
        )
        rows: dict[str, Shape] = {"tokens": ("R",), "logprobs": ("R",)}
        rows |= {name: ("R", MAX_LOGPROBS) for name in ("top_tokens", "top_logprobs")}
        names = {name: name for name in rows}
        names |= {f"{state}_out": f"{state}.out" for state in ("token_counts", "last_tokens")}
        sample = self._node("Sample", "sample", {}, {"logits": head["logits"]}, rows, names)
        self.outputs[:0] = [head["logits"], *(sample[name] for name in rows)]

    def _layer(self, layer: int, delta: gs.Variable, residual: gs.Variable) -> tuple[gs.Variable, gs.Variable]:
        c, name = self.config, f"layers.{layer}"
        stream: Shape = ("T", c.hidden_size)
        core, residual = self._attention(layer, delta, residual)
        out = self._node(
            "Linear",
            f"{name}.attn.out",
            {},
            {"x": core, **self._packed("weight", f"{name}.attn.out")},
            {"y": stream},
        )
        fields, parts = dict(self._eps), {"gate_up": f"{name}.mlp.gate_up", "down": f"{name}.mlp.down"}
        sources: dict[str, gs.Variable | str] = {}
        if not c.is_dense(layer):
            fields["top_k"] = c.num_experts_per_tok
            sources["router"] = f"{name}.mlp.router"
            parts = {f"{a}_{b}": f"{name}.mlp.{a}.{b}" for a in ("experts", "shared") for b in ("gate_up", "down")}
        for binding, tensor in parts.items():
            sources |= self._packed(binding, tensor)
        mlp = self._node(
            "NormMlp" if c.is_dense(layer) else "NormMoe",
            f"{name}.mlp",
            fields,
            {"delta": out["y"], "residual": residual, "norm": f"{name}.mlp.norm", **sources},
            {"out": stream, "residual_out": stream},
        )
        return mlp["out"], mlp["residual_out"]

    def _attention(self, layer: int, delta: gs.Variable, residual: gs.Variable) -> tuple[gs.Variable, gs.Variable]:
        """From the residual stream to attention's result: one node of a decode graph, two of a prefill graph."""
        c, name, full = self.config, f"layers.{layer}.attn", self.config.is_full(layer)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        kind: dict[str, FieldValue] = {"attention": "full" if full else "sliding", "num_kv_heads": kv_heads}
        window: dict[str, FieldValue] = {"window": 0 if full else c.sliding_window}
        shape: dict[str, FieldValue] = {"num_heads": heads, "head_dim": dim, "has_residual": int(layer > 0)}
        sinks, pool, pool_out = f"{name}.sinks", f"kv.{layer}", {"kv_pool_out": f"kv.{layer}.out"}
        projection = {"delta": delta, "residual": residual, "norm": f"{name}.norm", "kv_pool": pool}
        projection |= {x: f"{name}.{x}" for x in ("q_norm", "k_norm")} | self._packed("qkv", f"{name}.qkv")
        shapes: dict[str, Shape] = {
            "q": ("T", heads, dim),
            "fresh_kv": ("T", 2, kv_heads, dim),
            "out": ("T", heads * dim),
            "residual_out": ("T", c.hidden_size),
        }
        if self.phase == "decode":
            core = self._node(
                "NormQkvAttention",
                f"{name}.core",
                {**self._eps, **kind, **shape, **window},
                {**projection, "sinks": sinks},
                shapes,
                pool_out,
            )
            return core["out"], core.get("residual_out", residual)
        kind["phase"] = self.phase
        qkv = self._node("NormQkvRope", f"{name}.qkv", {**self._eps, **kind, **shape}, projection, shapes, pool_out)
        core = self._node(
            "SinkAttention",
            f"{name}.core",
            {**kind, **window},
            {"q": qkv["q"], "sinks": sinks, "kv_pool": qkv.get("kv_pool_out", pool)}
            | ({"fresh_kv": qkv["fresh_kv"]} if "fresh_kv" in qkv else {}),
            shapes,
            pool_out,
        )
        return core["out"], qkv.get("residual_out", residual)

    @property
    def _eps(self) -> dict[str, FieldValue]:
        return {"eps": self.config.rms_norm_eps}

    def _packed(self, binding: str, tensor: str) -> dict[str, gs.Variable | str]:
        """Sources of a packed weight's bindings: the weight and, in NVFP4, its scale."""
        return {binding: f"{tensor}.weight", f"{binding}_scale": f"{tensor}.scale"}

    def _node(
        self,
        op_name: str,
        name: str,
        fields: Mapping[str, FieldValue],
        sources: Mapping[str, gs.Variable | str],
        shapes: Mapping[str, Shape],
        names: Mapping[str, str] | None = None,
    ) -> dict[str, gs.Variable]:
        """Append a node and return its outputs by binding name.

        Args:
            sources: input binding -> variable or graph input; a binding not named here is the graph input of its name.
            shapes: output binding -> shape; an aliased output takes its input's.
            names: output binding -> tensor name, where it is a graph output.
        """
        op = OPS[op_name]
        if any(field.name == "weights" for field in op.fields):
            fields = {"weights": self.weights, **fields}
        op.check_fields(fields)
        inputs: dict[str, gs.Variable] = {}
        for binding in op.node_inputs(fields):
            source = sources.get(binding.name, binding.name)
            inputs[binding.name] = self.inputs[source] if isinstance(source, str) else source
        outputs: dict[str, gs.Variable] = {}
        for binding in op.node_outputs(fields):
            shape = inputs[binding.alias].shape if binding.alias else shapes[binding.name]
            outputs[binding.name] = self._output(name, binding, shape, names or {})
        attrs = {"plugin_version": VERSION, "plugin_namespace": DOMAIN, **fields}
        self.nodes.append(gs.Node(op_name, name, attrs, list(inputs.values()), list(outputs.values()), domain=DOMAIN))
        return outputs

    def _output(self, node: str, binding: Binding, shape: Shape, names: Mapping[str, str]) -> gs.Variable:
        variable = gs.Variable(
            names.get(binding.name, f"{node}.{binding.name}"), dtype=ONNX_TYPES[binding.dtypes[0]], shape=shape
        )
        if binding.alias:
            self.outputs.append(variable)
        return variable


def _profile(export: _Export, limits: Limits, phase: Phase) -> Profile:
    """The optimization profile of a phase, from the symbolic dimensions of the graph's inputs."""
    ranges = size_ranges(export.config, limits, phase)
    profile: Profile = {}
    for name, variable in export.inputs.items():
        if any(isinstance(dim, str) for dim in variable.shape):
            low, opt, high = (
                tuple(ranges[dim][i] if isinstance(dim, str) else dim for dim in variable.shape) for i in range(3)
            )
            profile[name] = (low, opt, high)
    return profile
