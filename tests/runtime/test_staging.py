"""Arrays packed into one block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_runtime.executors.staging import RESULT_ARRAYS, Sizes, pack, page_table_width
from flint_runtime.executors.step import STEP_ARRAYS


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 300))
def test_packed_arrays_lie_apart(tokens: int, sequences: int, columns: int, rows: int) -> None:
    for arrays in (STEP_ARRAYS, RESULT_ARRAYS):
        block = pack(arrays, Sizes(tokens, sequences, columns, rows).by_name())
        memory = np.zeros(block.size, np.uint8)
        views = block.views(memory)
        for index, view in enumerate(views.values(), 1):
            assert view.ctypes.data % 4 == 0
            assert not view.view(np.uint8).any()
            view.view(np.uint8)[...] = index % 250 + 1
        for index, (name, view) in enumerate(views.items(), 1):
            assert (view.view(np.uint8) == index % 250 + 1).all(), name
            assert block.addresses(4096)[name] == 4096 + view.ctypes.data - memory.ctypes.data


def test_page_table_widths() -> None:
    assert [page_table_width(n, 4096) for n in (1, 64, 65, 129, 4096)] == [64, 64, 128, 256, 4096]
    assert page_table_width(3, 4) == 4 and page_table_width(70, 100) == 100
