"""Requests, and running them through an engine core."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

from flint_runtime.engine_core import EngineCore
from flint_runtime.kv_cache.prefix_tree import NONE, PrefixNode, Snapshot
from flint_runtime.request import CoreOutput, EngineRequest, Grammar
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.sequence import Sequence


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    *,
    stop: Iterable[int] = (),
    eos: Iterable[int] = (),
    grammar: Grammar | None = None,
    **params: Any,
) -> EngineRequest:
    """A request that is greedy unless asked otherwise."""
    chosen = SamplingParams(**({"temperature": 0.0} | params)).with_defaults({})
    return EngineRequest(request_id, prompt, chosen, max_tokens, frozenset(stop), frozenset(eos), grammar)


class OracleLookup:
    """In the place of PromptLookup: proposes what the request will generate, often with an error in it."""

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    """By prompt; set by the tests."""

    def __init__(self, tokens: Iterable[int]) -> None:
        prompt = tuple(tokens)
        self._answer, self._known = self.answers[prompt], 0
        self._random = random.Random(len(prompt))

    def extend(self, tokens: Iterable[int]) -> None:
        """The next tokens."""
        self._known += len(list(tokens))

    def propose(self, most: int) -> list[int]:
        """Up to `most` of the tokens that follow."""
        found = self._answer[self._known : self._known + self._random.randint(0, most)]
        if found and self._random.random() < 0.5:
            found[self._random.randrange(len(found))] ^= 1
        return found


class Collected:
    """Everything a core has put out, by request."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[CoreOutput]] = {}

    def add(self, outputs: list[CoreOutput]) -> None:
        """Outputs of a step. A request that has ended must not put out anything more."""
        for output in outputs:
            known = self.outputs.setdefault(output.request_id, [])
            assert not known or known[-1].finish_reason is None, output
            known.append(output)

    def tokens(self, request_id: str) -> list[int]:
        """Token ids that a request has generated."""
        return [token.token_id for output in self.outputs.get(request_id, ()) for token in output.tokens]

    def last(self, request_id: str) -> CoreOutput:
        """A request's latest output."""
        return self.outputs[request_id][-1]


def run(core: EngineCore, requests: Iterable[EngineRequest] = (), most_steps: int = 100_000) -> Collected:
    """Add requests and step until everything has ended."""
    found = Collected()
    for one in requests:
        core.add(one)
    for _ in range(most_steps):
        if not core.has_work():
            return found
        found.add(core.step())
    raise AssertionError(f"not done after {most_steps} steps")


def check_accounting(core: EngineCore) -> None:
    """Every page and slot is where the books say, and nowhere else."""
    kv, scheduler = core._kv, core._scheduler
    in_flight = {s.number: s for flight in core._flights for s in flight.step.sequences}
    held: list[Sequence] = list({s.number: s for s in (*scheduler.running, *in_flight.values())}.values())
    tables = [s.table for s in held]
    pool = kv.pool
    references = Counter(page for table in tables for page in table.pages)
    assert all(references[page] == count for page, count in enumerate(pool.references))
    used, free, cached = set(references), pool._free, list(pool._cached)
    assert len(used) + len(free) + len(cached) == pool.size == len({*used, *free, *cached})
    # What several sequences hold was in the prefix tree, thus full, thus written by none of them.
    for table in tables:
        assert all(references[page] == 1 for page in table.pages[table.num_registered :])
    slots = [*(table.slot for table in tables), *kv._slots]
    assert sorted(slots) == list(range(kv.config.max_num_seqs))
    spare = [*kv._snapshots, *kv._spare]
    assert sorted(spare) == list(range(kv.config.max_num_seqs, kv.config.num_slots))
    nodes = prefix_nodes(core)
    assert {id(n) for n in nodes if n.page != NONE} == {id(n) for n in kv._node_of.values()}
    assert all(kv._node_of[n.page] is n and n.page in pool._kept for n in nodes if n.page != NONE)
    assert len(pool._kept) == len(kv._node_of)
    # A snapshot is where the books say: at the longest prefix that it serves, and at every shorter one.
    serving: dict[int, list[Snapshot]] = {id(n): [] for n in nodes}
    for slot, snapshot in kv._snapshots.items():
        assert snapshot.slot == slot and (snapshot.node.page != NONE or not kv.config.has_full_layers)
        node: PrefixNode | None = snapshot.node
        while node is not None and node.length and max(0, node.length - kv.config.sliding_window + 1) >= snapshot.first:
            serving[id(node)].append(snapshot)
            node = node.parent
    assert all(set(n.snapshots) == set(serving[id(n)]) for n in nodes)
    holders = Counter(id(table.node) for table in tables)
    assert all(n.holders == holders[id(n)] for n in nodes)
    assert all(n.page != NONE or n.snapshots or n.holders or n.children for n in nodes if n is not kv._root)


def check_idle(core: EngineCore) -> None:
    """Nothing runs, so nothing is used."""
    check_accounting(core)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)
    assert not core._flights and not core._sequences and not core._scheduler._leaving and not core._scheduler._preempted


def prefix_nodes(core: EngineCore) -> list[PrefixNode]:
    """Every node of the prefix tree, the root included."""
    found, todo = [], [core._kv._root]
    while todo:
        node = todo.pop()
        found.append(node)
        todo += node.children.values()
    return found
