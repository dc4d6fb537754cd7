"""Packing weights with the plugin library, several times as fast as numpy. `layout` says what the layouts are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flint_plugins.layout import GGUF_BLOCK_BYTES, PANEL_ROWS, TILE_COLUMNS
from flint_plugins.library import LibraryError, find_library

Array = npt.NDArray[Any]


def pack_nvfp4(matrices: Sequence[npt.NDArray[np.uint8]], out: npt.NDArray[np.uint8]) -> int:
    """Pack NVFP4 super-blocks; the interpreter lock is free meanwhile.

    Args:
        matrices: one, or two whose rows share the panels (gate and up): C-contiguous uint8 [rows, K / 64 * 36].
        out: C-contiguous uint8 [panels, 9 * K]; is filled.
    Returns:
        the largest scale byte.
    Raises:
        ValueError: the arrays do not fit each other. LibraryError: there is no library that packs.
    """
    return int(_pack("flintPackNvfp4", matrices, out, GGUF_BLOCK_BYTES))


def pack_bf16(matrices: Sequence[npt.NDArray[np.uint16]], out: npt.NDArray[np.uint16]) -> None:
    """Pack BF16 values, given as their bits: C-contiguous uint16 [rows, K] to [panels, 16 * K]; see `pack_nvfp4`."""
    _pack("flintPackBf16", matrices, out, TILE_COLUMNS)


def _pack(name: str, matrices: Sequence[Array], out: Array, tile_width: int) -> Any:
    first, last = matrices[0], matrices[-1]
    width, share = first.shape[1], PANEL_ROWS // len(matrices)
    tiles, panels = width // tile_width, len(first) // share
    fits = all(m.flags.c_contiguous and m.shape == (panels * share, tiles * tile_width) for m in matrices)
    if not fits or not out.flags.c_contiguous or out.size != panels * PANEL_ROWS * width:
        shapes = ", ".join(str(array.shape) for array in (*matrices, out))
        raise ValueError(f"matrices and packed panels of the shapes {shapes} do not fit each other")
    lower = last.ctypes.data + (0 if len(matrices) == 2 else PANEL_ROWS // 2 * width * last.itemsize)
    return getattr(_library(find_library()), name)(
        first.ctypes.data, lower, share * width, panels, tiles, out.ctypes.data
    )


@lru_cache(maxsize=4)
def _library(path: Path) -> ctypes.CDLL:
    """The library, its functions declared. Raises LibraryError."""
    try:
        library = ctypes.CDLL(str(path))
        for function in (library.flintPackNvfp4, library.flintPackBf16):
            pointer, size = ctypes.c_void_p, ctypes.c_int64
            function.argtypes = [pointer, pointer, size, size, ctypes.c_int32, pointer]
            function.restype = None
        library.flintPackNvfp4.restype = ctypes.c_int32
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"The plugin library {path} cannot pack weights: {error}. Install the package again."
        ) from None
    return library
