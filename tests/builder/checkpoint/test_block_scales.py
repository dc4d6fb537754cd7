"""C3: NVFP4 block scales that E4M3 does not have."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from flint_builder.checkpoint import block_scales
from flint_builder.repack import write_weights
from flint_plugins import layout
from flint_runtime.errors import CheckpointError
from tests.builder.checkpoint import tiny

EXPERTS = "blk.2.ffn_up_exps.weight"
SUPER_BLOCK = layout.GGUF_BLOCK_BYTES


def repack(path: Path, output: Path, lenient: bool) -> dict[str, int]:
    checkpoint, files = tiny.opened(path, lenient_scales=lenient)
    output.mkdir()
    write_weights(checkpoint, files, output, lambda count: None)
    return checkpoint.counts


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0x9A, 0xFF])
def test_c3_irregular_scale_is_refused_with_its_place(tmp_path: Path, byte: int) -> None:
    path = tiny.nvfp4(tmp_path)

    def damage(rows: npt.NDArray[np.uint8]) -> None:
        rows[3 * 64 + 9, SUPER_BLOCK + 2] = byte  # expert 3, row 9, second super-block, third block

    tiny.patch_tensor(path, EXPERTS, damage)
    place = rf"tensor {EXPERTS}, expert 3, row 9, block 6 of 16 values has the scale byte 0x{byte:02X}"
    with pytest.raises(CheckpointError, match=place):
        repack(path, tmp_path / "engine", lenient=False)


def test_c3_row_of_a_matrix(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    tiny.patch_tensor(path, "output.weight", lambda rows: rows[700].__setitem__(0, 0x7F))
    with pytest.raises(CheckpointError, match=r"tensor output\.weight, row 700, block 0 .*--lenient-scales"):
        repack(path, tmp_path / "engine", lenient=False)


def test_c3_lenient_decodes_as_ggml_does_and_counts(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)

    def damage(rows: npt.NDArray[np.uint8]) -> None:
        rows[17, 0:4] = 0x7F, 0x80, 0xC1, 0x38
        rows[100, SUPER_BLOCK] = 0xFE

    tiny.patch_tensor(path, "blk.0.attn_output.weight", damage)
    assert repack(path, tmp_path / "engine", lenient=True)["lenient_scales"] == 4
    stored = tiny.engine_tensor(tmp_path / "engine", "layer-00", "layers.0.attn.out.weight")
    blocks = layout.unpack_nvfp4(stored)
    assert int(block_scales.scale_bytes(blocks).max()) <= 0x7E
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_output.weight")
    theirs = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
    np.testing.assert_array_equal(layout.dequantize_blocks(blocks), theirs)


def test_c3_lenient_still_refuses_what_e4m3_cannot_hold(tmp_path: Path) -> None:
    path = tiny.nvfp4(tmp_path)
    tiny.patch_tensor(path, "blk.0.attn_output.weight", lambda rows: rows[5].__setitem__(1, 0xFF))
    with pytest.raises(CheckpointError, match=r"row 5, block 1 .* 0xFF, .* decodes 0xFF as 480"):
        repack(path, tmp_path / "engine", lenient=True)


def test_scale_bytes_round_trip() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (2, 3, 4 * SUPER_BLOCK), np.uint8)
    scales = block_scales.scale_bytes(blocks)
    assert scales.shape == (2, 3, 16)
    copy = blocks.copy()
    block_scales.set_scale_bytes(copy, scales)
    np.testing.assert_array_equal(copy, blocks)
