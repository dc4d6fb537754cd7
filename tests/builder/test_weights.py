"""The plan of weight files."""

from __future__ import annotations

from math import prod

import pytest

from flint_builder.checkpoint.names import gguf_name, split_experts
from flint_builder.weights import Source, WeightFile, weight_files
from flint_plugins.ops import DType
from flint_runtime.config import ModelConfig
from flint_runtime.manifest import WeightFormat
from tests.builder.checkpoint import tiny
from tests.shapes import FLINT, NANO
from tests.tools.checkpoints import flint_config, gguf_specs

TINY = ModelConfig.from_hf(tiny.CONFIG, "tiny")
FORMATS: tuple[WeightFormat, ...] = ("nvfp4", "bf16")


def plan(config: ModelConfig, weights: WeightFormat = "nvfp4", router: DType = "f32") -> tuple[WeightFile, ...]:
    return weight_files(config, weights, router, max_context=config.max_position_embeddings)


def sources(files: tuple[WeightFile, ...]) -> list[Source]:
    return [source for file in files for recipe in file.recipes for source in recipe.sources]


@pytest.mark.parametrize("weights", FORMATS)
def test_every_checkpoint_tensor_is_used_exactly_once(weights: WeightFormat) -> None:
    found = {gguf_name(source.name): source.shape for source in sources(plan(FLINT, weights))}
    assert found == {spec.name: spec.shape for spec in gguf_specs(flint_config())}
    assert len(found) == len(sources(plan(FLINT, weights)))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("config", [TINY, NANO, FLINT], ids=["tiny", "nano", "flint"])
def test_names_are_unique_and_bytes_add_up(config: ModelConfig, weights: WeightFormat) -> None:
    files = plan(config, weights)
    assert len({file.name for file in files}) == len(files) == config.num_hidden_layers + 2
    names = [tensor.name for file in files for tensor in file.tensors]
    assert len(set(names)) == len(names)
    for file in files:
        for recipe in file.recipes:
            if recipe.kind in ("pack", "pack_gate_up"):
                values = sum(prod(source.shape) for source in recipe.sources)
                assert recipe.outputs[0].bytes * 16 == values * (9 if weights == "nvfp4" else 32)


def test_size_of_the_released_model() -> None:
    size = sum(tensor.bytes for file in plan(FLINT) for tensor in file.tensors)
    # 22.2 GB NVFP4, embedding 0.61 GB, routers in F32 0.10 GB, RoPE table 0.13 GB.
    assert 22.9e9 < size < 23.2e9


def test_layers_have_their_kind_of_mlp() -> None:
    for layer, file in enumerate(plan(TINY)[1:-1]):
        names = {tensor.name.removeprefix(f"layers.{layer}.") for tensor in file.tensors}
        assert ("mlp.gate_up.weight" in names) == TINY.is_dense(layer)
        assert ("mlp.router" in names) != TINY.is_dense(layer)


@pytest.mark.parametrize("router", ["bf16", "f32"])
def test_router_has_the_checkpoints_type(router: DType) -> None:
    types = {t.dtype for file in plan(TINY, router=router) for t in file.tensors if t.name.endswith(".router")}
    assert types == {router}


def test_scales_are_one_per_source_and_expert() -> None:
    shapes = {tensor.name: tensor.shape for file in plan(TINY) for tensor in file.tensors}
    assert shapes["layers.2.attn.qkv.scale"] == (3,)
    assert shapes["layers.2.mlp.experts.gate_up.scale"] == (4, 2)
    assert shapes["layers.2.mlp.experts.down.scale"] == (4,)
    assert shapes["layers.2.mlp.shared.gate_up.scale"] == (2,)
    assert shapes["head.scale"] == (1,)
    assert not any(t.name.endswith(".scale") for file in plan(TINY, "bf16") for t in file.tensors)


def test_rope_table_only_where_a_layer_slides() -> None:
    full = TINY.model_copy(update={"layer_types": ("full_attention",) * 4})
    tables = [[t.name for t in plan(config)[0].tensors] for config in (TINY, full)]
    assert tables == [["embedding", "rope"], ["embedding"]]


def test_names_of_experts() -> None:
    assert split_experts(tiny.GATE) == ("model.layers.2.mlp.experts", "gate")
    assert split_experts("model.layers.2.mlp.shared_expert.gate_proj.weight") is None
