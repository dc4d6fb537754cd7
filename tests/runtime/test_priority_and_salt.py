"""priority and cache_salt: whoever is more urgent goes first, and prefixes are shared among the same salt only."""

from __future__ import annotations

from typing import Any

import pytest

from flint_runtime.errors import UsageError
from flint_runtime.sampling_params import SamplingParams
from tests.runtime.cores import check_idle, request, run
from tests.runtime.fake_executor import expected_tokens
from tests.runtime.test_engine_core import open_core, prompt
from tests.runtime.test_scheduler import Driver


def test_the_lowest_priority_value_gets_a_place_first() -> None:
    """Ties in order of arrival; nobody who has a place loses it to a newcomer."""
    driver = Driver()
    for priority in (0, 5, -1, 5, 0, -1, -7):
        driver.add(10, 3, priority=priority)
    assert driver.step() == ("prefill", {6: 10, 2: 10, 5: 10, 0: 10})
    assert [sequence.number for sequence in driver.scheduler.waiting] == [4, 1, 3]


def test_the_most_urgent_request_is_never_preempted() -> None:
    core, _ = open_core(pages=10, max_model_len=600, snapshots=0)
    requests = [request(str(i), prompt(100, i), 150, priority=-i) for i in range(4)]
    for one in requests:
        core.add(one)
    urgent = core._sequences["3"]
    while urgent.status.value != "running":
        core.step()
    ended: list[str] = []
    while core.has_work():
        ended += [output.request_id for output in core.step() if output.finish_reason]
        assert "3" in ended or urgent.status.value == "running"
    assert core.stats().preemptions and ended[0] == "3"
    check_idle(core)


def test_prefixes_are_shared_with_the_same_salt_only() -> None:
    tokens = prompt(300)
    core, _ = open_core()
    cached = []
    for index, salt in enumerate((None, "a", "b", "a", None, "b")):
        one = request(str(index), tokens, 5, cache_salt=salt)
        found = run(core, [one])
        assert found.tokens(str(index)) == expected_tokens(one)
        cached.append(found.last(str(index)).cached_tokens)
    assert cached == [0, 0, 0, 256, 256, 256]


def test_nobody_waits_for_the_prefix_of_another_salt() -> None:
    tokens = prompt(500)
    core, _ = open_core()
    salts = ("a", "b", "b")
    requests = [request(str(i), [*tokens, i], 5, cache_salt=salt) for i, salt in enumerate(salts)]
    found = run(core, requests)
    for one in requests:
        assert found.tokens(one.request_id) == expected_tokens(one)
    assert found.last("0").cached_tokens == found.last("1").cached_tokens == 0


def test_a_salt_goes_with_what_is_cached_of_it() -> None:
    core, _ = open_core(pages=12, snapshots=2)
    for index in range(30):
        run(core, [request(str(index), prompt(200, index), 3, cache_salt=f"salt {index}")])
    assert len(core._kv._salted) <= 12


@pytest.mark.parametrize(
    ("params", "name"),
    [({"thinking_token_budget": value}, "thinking_token_budget") for value in (-1, 1.5, "3", True, 2**31)]
    + [({"priority": value}, "priority") for value in (None, 0.5, "1", True, 2**63)]
    + [({"cache_salt": value}, "cache_salt") for value in ("", 3, b"a", "\ud800")],
)
def test_what_is_refused(params: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**params)
