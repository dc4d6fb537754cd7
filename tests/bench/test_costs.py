"""The benchmark's floors against the design's own figures for the released model."""

from __future__ import annotations

import pytest

from tests.bench import costs
from tests.shapes import FLINT


@pytest.mark.parametrize(("context", "gigabytes"), [(1000, 1.51), (32_000, 2.43), (100_000, 4.35), (262_000, 9.0)])
def test_bytes_of_a_decoded_token(context: int, gigabytes: float) -> None:
    """The performance document's table, with routers in BF16: ours are FP32, 49 MB more."""
    found = costs.step(1, context - 1, 1, "nvfp4").bytes / 1e9 - 0.049
    assert found == pytest.approx(gigabytes, rel=0.02)


def test_bytes_of_parts() -> None:
    layers, moe_layers = FLINT.num_hidden_layers, FLINT.num_hidden_layers - 2
    attention = (costs.qkv(1, "nvfp4") + costs.output(1, "nvfp4")) * layers
    assert attention.bytes / 1e6 == pytest.approx(520, rel=0.01)
    assert costs.mlp(1, "nvfp4").bytes * 2 / 1e6 == pytest.approx(42, rel=0.02)
    assert costs.moe(1, "nvfp4").bytes * moe_layers / 1e6 == pytest.approx(665 + 98, rel=0.01)
    assert costs.head(1, "nvfp4").bytes / 1e6 == pytest.approx(173, rel=0.01)
    assert costs.attention(0, 1000, sliding=False).bytes * len(FLINT.full_layers) / 1e6 == pytest.approx(28.7, rel=0.01)
    assert costs.attention(5000, 1, sliding=True).bytes * len(FLINT.sliding_layers) / 1e6 == pytest.approx(37, rel=0.02)


def test_a_bf16_token_at_100k() -> None:
    assert costs.step(1, 99_999, 1, "bf16").bytes / 1e9 == pytest.approx(7.9, rel=0.02)


def test_experts_of_a_batch() -> None:
    """44 of 256 experts per layer for 8 tokens; all of them for thousands."""
    expert = 3 * 512 * 2048 * 0.5625
    rest = costs.moe(1, "nvfp4").bytes - 6 * expert
    assert (costs.moe(8, "nvfp4").bytes - rest) / expert == pytest.approx(44, abs=0.5)
    assert (costs.moe(8192, "nvfp4").bytes - rest) / expert == pytest.approx(256, abs=0.01)


def test_flops_of_prefill() -> None:
    assert costs.prefill(8192, 8192, "nvfp4").flops / 1e12 == pytest.approx(46, rel=0.05)
    assert costs.prefill(100_000, 8192, "nvfp4").flops / 1e15 == pytest.approx(1.6, rel=0.05)


def test_flops_of_attention() -> None:
    """Counted one query at a time."""
    per_key = 4 * 32 * 128
    assert costs.attention(10, 3, sliding=False).flops == per_key * (11 + 12 + 13)
    assert costs.attention(511, 3, sliding=True).flops == per_key * (512 + 513 + 513)
    assert costs.attention(511, 3, sliding=True).bytes == 514 * 2048
    assert costs.attention(1000, 3, sliding=True).bytes == 515 * 2048


def test_the_floor_is_what_takes_longer() -> None:
    assert costs.Cost(4e9, 1e12).floor_ms(4, 700) == pytest.approx(1.4285, rel=1e-3)
    assert costs.Cost(8e9, 1e12).floor_ms(4, 700) == pytest.approx(2)
