"""Whether an engine fits the GPU, and what to tell a person where it does not."""

from __future__ import annotations

from flint_plugins.ops import PAGE_TOKENS
from flint_runtime.engine import Engine
from flint_runtime.errors import ResourceError
from flint_runtime.executors import cuda
from flint_runtime.executors.step import Pools
from flint_runtime.memory import MemoryPlan

HEADROOM_BYTES = 64 << 20
"""Left free for modules that CUDA loads late, and for CUDA graphs."""


def _plan(engine: Engine, weight_bytes: int) -> MemoryPlan:
    return MemoryPlan(engine.manifest.model, weight_bytes, engine.manifest.limits)


def table(rows: dict[str, int]) -> str:
    """Components and their sum, in a line."""
    rows = {**rows, "total": sum(rows.values())}
    return "; ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in rows.items())


def largest_context(plan: MemoryPlan, free: int, sequences: int) -> int:
    """Longest context in tokens, at most the engine's, of `sequences` sequences whose states fit `free` bytes."""
    limits = plan.limits
    left = free - sequences * (plan.slot_bytes + plan.sample_slot_bytes)
    if left < 0:
        return 0
    if not plan.page_bytes:
        return limits.max_context
    return min(limits.max_context, left // (sequences * plan.page_bytes) * PAGE_TOKENS)


def _message(
    engine: Engine, what: str, rows: dict[str, int], context: int, sequences: int, cause: str
) -> ResourceError:
    free, total = cuda.memory_info()
    if context:
        of_each = f" for each of {sequences} sequences" if sequences > 1 else ""
        cure = f"The largest context that would fit is {context:,} tokens{of_each}; ask for that, or free GPU memory."
    else:
        cure = "Not even one page of KV cache would fit: free GPU memory, or use a larger GPU or smaller weights."
    return ResourceError(
        f"{what} of engine {engine.directory} does not fit this GPU, which has {total / 2**30:.2f} GiB, "
        f"{free / 2**30:.2f} GiB of it free now{f' ({cause})' if cause else ''}. Needed: {table(rows)}. {cure}"
    )


def open_error(engine: Engine, weight_bytes: int, arena_bytes: int, cause: str = "") -> ResourceError:
    """Weights and arena do not fit, or leave no room for one page and the sampling states of one sequence."""
    plan = _plan(engine, weight_bytes)
    rows = {
        "weights": weight_bytes,
        "activations and workspace": arena_bytes,
        "least KV cache (one sequence, one page)": plan.page_bytes + plan.slot_bytes,
        "sampling states of one sequence": plan.sample_slot_bytes,
    }
    free = cuda.memory_info()[0] - weight_bytes - arena_bytes - HEADROOM_BYTES
    context = largest_context(plan, free, 1)
    return _message(engine, "The model", rows, context, 1, cause)


def check_open(engine: Engine, weight_bytes: int, arena_bytes: int) -> None:
    """Raise ResourceError unless weights, arena and the states of one sequence fit what is free now."""
    plan = _plan(engine, weight_bytes)
    states = plan.page_bytes + plan.slot_bytes + plan.sample_slot_bytes
    needed = weight_bytes + arena_bytes + states + HEADROOM_BYTES
    if needed > cuda.memory_info()[0]:
        raise open_error(engine, weight_bytes, arena_bytes)


def pools_error(engine: Engine, pools: Pools, weight_bytes: int, arena_bytes: int, cause: str = "") -> ResourceError:
    """The states do not fit beside weights and arena, which are on the GPU already."""
    plan = _plan(engine, weight_bytes)
    rows = {
        "weights": weight_bytes,
        "activations and workspace": arena_bytes,
        f"KV cache, full layers ({pools.pages:,} pages of {PAGE_TOKENS} tokens)": pools.pages * plan.page_bytes,
        f"KV cache, sliding layers ({pools.slots:,} slots)": pools.slots * plan.slot_bytes,
        f"sampling states ({pools.sample_slots:,} slots)": pools.sample_slots * plan.sample_slot_bytes,
    }
    sequences = max(1, pools.slots)
    context = largest_context(plan, cuda.memory_info()[0] - HEADROOM_BYTES, sequences)
    return _message(engine, "The KV cache", rows, context, sequences, cause)
