"""Matrix products of nine tokens and more on the GPU (Linear, NormMlp, NormMoe) against the torch oracle.

Every T here is beyond the low-latency path. Of a few tokens K is divided over a cluster of blocks: the sizes of T fall
on both sides of what its instances hold (16, 32 and 64 tokens, and several times 64), and K is not always divided
evenly. Beyond, they fall on both sides of what the tile shapes hold and, on an H200, choose each at least once. The
experts of NormMoe take T through groups of 8 and of 16, and through the tile shapes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flint_plugins import layout
from flint_plugins.ops import FieldValue
from tests.gpu import torch_oracle as oracle
from tests.gpu.inputs import EPS, FORMATS, TOP_K
from tests.gpu.ops import run_op

pytestmark = pytest.mark.gpu


def weight(fmt: str, lead: tuple[int, ...], rows: int, columns: int, generator: np.random.Generator) -> Tensor:
    """Random packed weight; products with x of unit variance, times `scales`, have about unit variance."""
    if fmt == "nvfp4":
        shape = (*lead, rows, columns // 64, 36)
        blocks = generator.integers(0, 256, shape, dtype=np.uint8)
        blocks[..., :4] = generator.integers(0x30, 0x41, (*shape[:-1], 4))  # E4M3 0.5 .. 2
        packed = layout.pack_nvfp4(blocks.reshape(*lead, rows, -1))
        return torch.from_numpy(packed.view(np.int8))
    values = generator.standard_normal((*lead, rows, columns), dtype=np.float32) / math.sqrt(columns)
    bits = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(layout.pack_bf16(bits).view(np.int16)).view(torch.bfloat16)


def scales(shape: tuple[int, ...], columns: int, generator: np.random.Generator) -> Tensor:
    """Tensor scales, all different."""
    low = 1 / (4 * math.sqrt(columns))
    return torch.from_numpy(generator.uniform(low, 2 * low, shape).astype(np.float32))


def normal(shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).bfloat16()


def stream(tokens: int, hidden: int, generator: np.random.Generator) -> dict[str, Tensor]:
    return {
        "delta": normal((tokens, hidden), generator),
        "residual": normal((tokens, hidden), generator),
        "norm": torch.from_numpy(generator.uniform(0.5, 1.5, hidden).astype(np.float32)),
    }


def packed(
    name: str, fmt: str, size: tuple[int, int], scale: tuple[int, ...], generator: np.random.Generator,
    lead: tuple[int, ...] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """The bindings of one packed weight."""
    tensors = {name: weight(fmt, lead, *size, generator)}
    if fmt == "nvfp4":
        tensors[f"{name}_scale"] = scales((*lead, *scale), size[1], generator)
    return tensors


def run(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The op's outputs, on the GPU; it must give the same bits twice, launched and from a CUDA graph."""
    device = {name: tensor.cuda() for name, tensor in inputs.items()}
    first, second = (
        {name: tensor.clone() for name, tensor in run_op(op, fields, device, use_graph=graph).items()}
        for graph in (False, True)
    )
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.int16), second[name].view(torch.int16)), f"{name}: not deterministic"
    return first


def check(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor]) -> None:
    """Run the op and compare every output with the oracle's; of NormMoe, tokens without a near-tie count."""
    found = run(op, fields, inputs)
    device = {name: tensor.cuda() for name, tensor in inputs.items()}
    rows = torch.ones(len(next(iter(found.values()))), dtype=torch.bool, device="cuda")
    if op == "NormMoe":
        rows = oracle.clear_choice(oracle.router_logits(fields, device), TOP_K)
        assert rows.float().mean() > 0.9
    for name, expected in oracle.OPS[op](fields, device).items():
        wanted = oracle.Bounded(expected.value[rows], expected.allowed[rows])
        oracle.check(found[name][rows], wanted, oracle.ALL, name)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "columns", "rows"),
    [
        (9, 2048, 5120),
        (16, 4096, 2048),
        (17, 1024, 2048),
        (32, 4096, 2048),
        (33, 6144, 2048),
        (64, 2048, 5120),
        (9, 64, 16),  # one K-tile, one panel
        (24, 5 * 64, 5 * 16),  # a block alone; rows that fill no tile
        (40, 10 * 64, 128 + 16),  # shares of 6 and of 4 K-tiles, their scales in pairs
        (31, 33 * 64, 128),  # of 5 and of 4, their scales one by one
        (64, 52 * 64, 48),  # of 8 and of 4, their scales in fours
        (16, 2048, 12288 + 16),  # one share of more K-tiles than shared memory holds
        (48, 2048, 12288 + 16),
        (65, 2048, 2048),
        (129, 4096, 2048),
        (300, 5 * 64, 5 * 16),
        (512, 10 * 64, 2048),
        (100, 2048, 12288),  # no longer divided
        (600, 64, 16),  # one K-tile, one panel
        (600, 5 * 64, 5 * 16),  # scales one by one; rows that fill no tile
        (1000, 6 * 64, 2048 + 48),  # scales in pairs
        (1000, 4 * 64, 256 + 48),
        (1600, 4 * 64, 512 + 16),
        (777, 2048, 5120),
        (2500, 1024, 2048 + 16),  # many tiles of the largest shape, the last ones partly filled both ways
    ],
)
def test_linear(fmt: str, tokens: int, columns: int, rows: int) -> None:
    generator = np.random.default_rng([tokens, columns, rows])
    inputs = {"x": normal((tokens, columns), generator)}
    inputs |= packed("weight", fmt, (rows, columns), (1,), generator)
    check("Linear", {"weights": fmt}, inputs)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [14, 27, 51, 200])
def test_linear_rows_do_not_mix(fmt: str, tokens: int) -> None:
    """A token of infinities and NaN spoils its own row only."""
    generator = np.random.default_rng(1)
    inputs = {"x": normal((tokens, 512), generator)} | packed("weight", fmt, (256, 512), (1,), generator)
    fields: dict[str, FieldValue] = {"weights": fmt}
    clean = run("Linear", fields, inputs)["y"]
    nan, inf = tokens // 3, tokens * 2 // 3
    inputs["x"][nan] = torch.nan
    inputs["x"][inf, 5] = torch.inf
    spoilt = run("Linear", fields, inputs)["y"]
    assert spoilt[nan].isnan().all()
    rest = [t for t in range(tokens) if t not in (nan, inf)]
    assert torch.equal(spoilt[rest], clean[rest])


def check_same_bits(op: str, fields: dict[str, FieldValue], inputs: dict[str, Tensor], names: tuple[str, ...]) -> None:
    """Tokens give the same bits among 64 as among fewer, wherever they stand; `names` are the inputs [T, ...]."""
    whole = run(op, fields, inputs)
    for first, tokens in [(0, 9), (55, 9), (3, 16), (47, 17), (8, 31), (30, 32), (5, 33), (0, 48), (1, 63)]:
        rows = slice(first, first + tokens)
        part = run(op, fields, {k: v[rows].clone() if k in names else v for k, v in inputs.items()})
        for name, tensor in part.items():
            assert torch.equal(tensor.view(torch.int16), whole[name][rows].view(torch.int16)), f"{name}: {rows}"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("columns", "rows"), [(2048, 5120), (4096, 2048), (33 * 64, 256)])
def test_linear_alone_and_in_a_batch(fmt: str, columns: int, rows: int) -> None:
    generator = np.random.default_rng([columns, rows])
    inputs = {"x": normal((64, columns), generator)} | packed("weight", fmt, (rows, columns), (1,), generator)
    check_same_bits("Linear", {"weights": fmt}, inputs, ("x",))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("intermediate", [1024, 6144])
def test_norm_mlp_alone_and_in_a_batch(fmt: str, intermediate: int) -> None:
    generator = np.random.default_rng(intermediate)
    inputs = stream(64, 2048, generator)
    inputs |= packed("gate_up", fmt, (2 * intermediate, 2048), (2,), generator)
    inputs |= packed("down", fmt, (2048, intermediate), (1,), generator)
    check_same_bits("NormMlp", {"weights": fmt, "eps": EPS}, inputs, ("delta", "residual"))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [
        (9, 2048, 6144),
        (16, 2048, 1024),
        (17, 128, 64),
        (32, 2048, 1024),
        (33, 2048, 6144),
        (64, 2048, 1024),
        (65, 2048, 6144),
        (150, 128, 256),
        (700, 2048, 1024),
        (1500, 128, 64),
    ],
)
def test_norm_mlp(fmt: str, tokens: int, hidden: int, intermediate: int) -> None:
    generator = np.random.default_rng([tokens, hidden, intermediate])
    inputs = stream(tokens, hidden, generator)
    inputs |= packed("gate_up", fmt, (2 * intermediate, hidden), (2,), generator)
    inputs |= packed("down", fmt, (hidden, intermediate), (1,), generator)
    check("NormMlp", {"weights": fmt, "eps": EPS}, inputs)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "shared"),
    [
        (9, 128, 64, 64),
        (17, 2048, 512, 1024),
        (40, 128, 64, 64),
        (50, 2048, 512, 1024),
        (63, 128, 64, 64),
        (64, 2048, 512, 1024),
        (20, 128, 7168, 64),  # rows of which too few fit shared memory
        (65, 2048, 512, 1024),
        (96, 2048, 512, 1024),
        (170, 2048, 512, 1024),
        (400, 128, 64, 64),
        (3000, 128, 64, 64),
    ],
)
def test_norm_moe(fmt: str, skewed: bool, tokens: int, hidden: int, intermediate: int, shared: int) -> None:
    """Experts with a few tokens, with several tiles, and (skewed) with all tokens or none."""
    experts = 16
    generator = np.random.default_rng([tokens, hidden, skewed])
    inputs = stream(tokens, hidden, generator)
    router = generator.standard_normal((experts, hidden), dtype=np.float32) / math.sqrt(hidden)
    if skewed:
        # The first column of x is large and positive for all tokens: expert 11 is always first, 3 and 4 never chosen.
        inputs["delta"][:, 0] = 8
        inputs["residual"][:, 0] = 0
        router[:, 0] = 0
        router[11, 0], router[3, 0], router[4, 0] = 2, -2, -2
    inputs["router"] = torch.from_numpy(router)
    if fmt == "bf16":
        inputs["router"] = inputs["router"].bfloat16()
    lead = (experts,)
    inputs |= packed("experts_gate_up", fmt, (2 * intermediate, hidden), (2,), generator, lead)
    inputs |= packed("experts_down", fmt, (hidden, intermediate), (), generator, lead)
    inputs |= packed("shared_gate_up", fmt, (2 * shared, hidden), (2,), generator)
    inputs |= packed("shared_down", fmt, (hidden, shared), (1,), generator)
    check("NormMoe", {"weights": fmt, "eps": EPS, "top_k": TOP_K}, inputs)
