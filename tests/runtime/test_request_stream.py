"""RequestStream: outputs merge for a reader that stopped, and none is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from flint_runtime.errors import EngineDeadError
from flint_runtime.outputs import CompletionOutput, Logprob, RequestOutput
from flint_runtime.request_stream import _MOST_UNMERGED, RequestStream, merge_deltas


def output(*choices: CompletionOutput, finished: bool = False, **more: Any) -> RequestOutput:
    return RequestOutput("r", None, [1], list(choices), finished, **more)


def delta(index: int, token: int, **more: Any) -> CompletionOutput:
    logprobs = [{token: Logprob(-1.0, 1, str(token))}]
    return CompletionOutput(index, f"{token} ", [token], -float(token), logprobs, **more)


def test_deltas_merge_by_choice() -> None:
    first = output(delta(1, 10, marks=[(0, 10)]), prompt_logprobs=[None])
    second = output(
        delta(0, 20), delta(1, 11, finish_reason="stop", stop_reason=11, marks=[(3, 11)]), num_cached_tokens=64
    )
    third = output(delta(0, 21, finish_reason="length"), finished=True, num_cached_tokens=64)
    merged = merge_deltas([first, second, third])
    zero, one = merged.outputs
    assert (zero.index, zero.text, zero.token_ids, zero.finish_reason) == (0, "20 21 ", [20, 21], "length")
    assert (one.index, one.text, one.token_ids, one.finish_reason) == (1, "10 11 ", [10, 11], "stop")
    assert one.stop_reason == 11 and zero.cumulative_logprob == -21.0
    assert (zero.marks, one.marks) == ([], [(0, 10), (3, 11)])
    assert zero.logprobs is not None and [list(entry) for entry in zero.logprobs] == [[20], [21]]
    assert merged.finished and merged.prompt_logprobs == [None] and merged.num_cached_tokens == 64
    assert first.outputs[0].token_ids == [10], "the parts stay as they are"
    assert merge_deltas([first]) is first


@pytest.mark.parametrize("count", [1, 2, _MOST_UNMERGED, _MOST_UNMERGED + 1, 1000])
@pytest.mark.parametrize("is_delta", [True, False])
def test_a_reader_that_stopped_gets_one_output(count: int, is_delta: bool) -> None:
    async def main() -> None:
        stream = RequestStream("r", asyncio.get_running_loop(), delta=is_delta)
        woken = [stream.put(output(delta(0, i), finished=i == count - 1)) for i in range(count)]
        assert woken == [True] + [False] * (count - 1), "one call of the event loop, however many outputs"
        assert len(stream._outputs) <= _MOST_UNMERGED
        stream.wake()
        found = await stream.get()
        expected = list(range(count)) if is_delta else [count - 1]
        assert found.outputs[0].token_ids == expected and found.finished
        assert stream.put(output(delta(0, 7))), "and again"

    asyncio.run(main())


def test_an_error_comes_behind_the_outputs() -> None:
    async def main() -> None:
        stream = RequestStream("r", asyncio.get_running_loop(), delta=True)
        stream.put(output(delta(0, 1)))
        assert not stream.put(EngineDeadError("dead"))
        stream.wake()
        assert (await stream.get()).outputs[0].token_ids == [1]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="dead"):
                await asyncio.wait_for(stream.get(), 1)
            stream.wake()

    asyncio.run(main())


def test_nothing_is_lost_between_two_threads() -> None:
    count = 5000

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stream = RequestStream("r", loop, delta=True)

        def write() -> None:
            for i in range(count):
                if stream.put(output(delta(0, i), finished=i == count - 1)):
                    loop.call_soon_threadsafe(stream.wake)
                if i % 100 == 0:
                    time.sleep(0.0001)

        writer = threading.Thread(target=write)
        writer.start()
        found: list[int] = []
        finished = False
        while not finished:
            one = await asyncio.wait_for(stream.get(), 10)
            found += one.outputs[0].token_ids
            finished = one.finished
        writer.join()
        assert found == list(range(count))

    asyncio.run(main())
