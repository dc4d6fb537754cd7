"""Logprobs and ranks against the logits themselves: of the answer, of given tokens, and of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flint_plugins.ops import MAX_LOGPROBS
from flint_runtime.executors.base import StepResult
from flint_runtime.executors.reference_sample import log_softmax
from flint_runtime.llm import LLM
from flint_runtime.outputs import RequestOutput
from flint_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from flint_runtime.token_logprobs import needs_logits, token_output
from tests.runtime.engines import Place, feed, open_poisoned

PROMPT = list(range(40, 90))
WILD: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, "reference", enable_prefix_caching=False) as llm:
        yield llm


def generate(llm: LLM, **params: Any) -> RequestOutput:
    return llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0]


def logits_behind(directory: Path, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of every place of PROMPT and tokens: what the next one is drawn from."""
    executor = open_poisoned(directory)
    return feed(executor, Place(executor), PROMPT + tokens, 16)


def true_rank(logits: np.ndarray[Any, Any], token: int) -> int:
    """Place among all, the likeliest first, ties by id."""
    return 1 + np.argsort(-logits, kind="stable").tolist().index(token)


@pytest.mark.parametrize("logprobs", [0, 3, 20])
def test_ranks_are_true(directory: Path, llm: LLM, logprobs: int) -> None:
    """Also far below the tokens that the device reports."""
    found = generate(llm, **WILD, logprobs=logprobs).outputs[0]
    rows = logits_behind(directory, found.token_ids[:-1])[len(PROMPT) - 1 :]
    assert found.logprobs is not None
    ranks = []
    for entry, token, row in zip(found.logprobs, found.token_ids, rows, strict=True):
        exact = log_softmax(row)
        assert len(entry) in (logprobs, logprobs + 1)
        for other, reported in entry.items():
            assert reported.rank == true_rank(row, other)
            assert reported.logprob == pytest.approx(exact[other], abs=1e-4)
            assert reported.token_bytes == llm.tokenizer.token_bytes(other)
            assert reported.decoded_token == reported.token_bytes.decode("utf-8", "replace")
        ranks.append(entry[token].rank or 0)
    assert max(ranks) > 100 and sum(rank > MAX_LOGPROBS for rank in ranks) > 5


def test_logprob_token_ids(directory: Path, llm: LLM) -> None:
    """Exactly these, and the token itself."""
    given = [700, 3, 41, 5]
    found = generate(llm, **WILD, logprob_token_ids=given).outputs[0]
    rows = logits_behind(directory, found.token_ids[:-1])[len(PROMPT) - 1 :]
    assert found.logprobs is not None and len(found.logprobs) == 12
    for entry, token, row in zip(found.logprobs, found.token_ids, rows, strict=True):
        exact = log_softmax(row)
        assert set(entry) == {token, *given}
        for other, reported in entry.items():
            assert reported.logprob == pytest.approx(exact[other], abs=1e-4)
            rank = true_rank(row, other)
            assert reported.rank == (rank if rank <= MAX_LOGPROBS or other == token else None)


def test_a_choice_is_scored_by_one_token(llm: LLM) -> None:
    """As classifiers do: the labels' logprobs at the first token, whatever is drawn."""
    labels = {"yes": llm.tokenizer.encode("y")[0], "no": llm.tokenizer.encode("n")[0]}
    found = generate(
        llm, temperature=0, max_tokens=1, allowed_token_ids=labels.values(), logprob_token_ids=list(labels.values())
    ).outputs[0]
    assert found.logprobs is not None
    best = max(labels.values(), key=lambda token: found.logprobs[0][token].logprob)  # type: ignore[index]
    assert found.token_ids == [best]


def test_neighbours_with_and_without(directory: Path, llm: LLM) -> None:
    """Of the rows of a step only those come back that are asked for; each request gets its own."""
    kinds: list[dict[str, Any]] = [
        {"logprob_token_ids": [700, 3]}, {}, {"logprobs": 2}, {"prompt_logprobs": 1, "logprobs": 1},
        {"temperature": 0.0, "logprobs": 2},
    ]  # fmt: skip
    params = [SamplingParams(**{**WILD, **kind}) for kind in kinds]
    alone = [llm.generate(PROMPT, own)[0].outputs[0] for own in params]
    for speculative in (0, 3):
        with LLM(directory, "reference", num_speculative_tokens=speculative) as other:
            together = other.generate([PROMPT] * len(params), params)
        for one, output in zip(alone, together, strict=True):
            found = output.outputs[0]
            assert found.token_ids == one.token_ids
            assert (found.logprobs is None) == (one.logprobs is None)
            for entry, expected in zip(found.logprobs or [], one.logprobs or [], strict=True):
                assert entry.keys() == expected.keys()
                assert [e.rank for e in entry.values()] == [e.rank for e in expected.values()]
                np.testing.assert_allclose(
                    [e.logprob for e in entry.values()], [e.logprob for e in expected.values()], atol=1e-4
                )


def test_prompt_ranks_are_true_or_none(directory: Path, llm: LLM) -> None:
    output = generate(llm, max_tokens=1, prompt_logprobs=0)
    rows = logits_behind(directory, [])
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for entry, token, row in zip(output.prompt_logprobs[1:], PROMPT[1:], rows, strict=False):
        rank = true_rank(row, token)
        assert entry is not None and entry[token].rank == (rank if rank <= MAX_LOGPROBS else None)


@pytest.mark.parametrize(
    ("params", "constrained", "expected"),
    [
        ({}, False, False),
        ({"logprobs": 5}, False, False),
        ({"logprobs": 5}, True, True),
        ({"logprobs": 5, "top_k": 0}, False, True),
        ({"logprobs": 0, "top_k": 21}, False, True),
        ({"logprobs": 0, "top_k": 0, "temperature": 0}, False, False),
        ({"top_k": 0}, True, False),
        ({"logprob_token_ids": [1], "temperature": 0}, False, True),
    ],
)
def test_logits_come_back_only_where_they_are_needed(params: dict[str, Any], constrained: bool, expected: bool) -> None:
    """They are 600 KB a token."""
    assert needs_logits(SamplingParams(**params).with_defaults({}), constrained=constrained) is expected


def test_a_token_that_ties_with_the_last_one_kept_shares_its_rank() -> None:
    """Top-k keeps it, and the device reports 20 of those that are as likely."""
    best = np.arange(MAX_LOGPROBS, dtype=np.int32)[None]
    logprobs = np.array([[*range(-1, -19, -1), -19.0, -19.0]], np.float32)
    result = StepResult(np.array([50], np.int32), np.array([-19.0], np.float32), best, logprobs)
    assert token_output(50, 0, result, most=2).rank == 19
    logits = np.full(64, -30.0, np.float32)
    logits[:MAX_LOGPROBS], logits[[50, 60]] = logprobs[0], -19.0
    assert token_output(50, 0, result, most=2, logits=logits).rank == 21
    assert token_output(50, 0, result, most=0, logits=logits).top_tokens == ()


def test_structured_answers_have_ranks_below_the_likeliest(llm: LLM) -> None:
    params = StructuredOutputsParams(choice=["zq", "qz"])
    found = generate(llm, temperature=0, max_tokens=8, logprobs=1, structured_outputs=params).outputs[0]
    assert found.text in ("zq", "qz") and found.logprobs is not None
    ranks = [entry[token].rank for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
    assert None not in ranks and max(rank or 0 for rank in ranks) > MAX_LOGPROBS
