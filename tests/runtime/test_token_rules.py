"""allowed_token_ids and bad_words: masks alone, beside a grammar, and in answers of the reference executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flint_runtime.engine_core import CoreConfig
from flint_runtime.errors import UsageError
from flint_runtime.llm import LLM
from flint_runtime.outputs import CompletionOutput
from flint_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from flint_runtime.structured import GrammarCompiler
from flint_runtime.token_rules import TokenRules
from tests.runtime.fake_core import EOS, TOKENIZER

VOCABULARY = 768
PROMPT = list(range(40, 90))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, "reference") as llm:
        yield llm


def answer(llm: LLM, prompt: str | list[int] = PROMPT, **params: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def allowed(mask: Any) -> set[int]:
    """Tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def rules(**params: Any) -> TokenRules:
    return TokenRules(SamplingParams(**params), TOKENIZER, VOCABULARY)


def test_no_rule_leaves_the_grammar_alone() -> None:
    assert rules().answer() is None
    grammar = GrammarCompiler(TOKENIZER, VOCABULARY).compile(StructuredOutputsParams(regex="a"))
    assert rules().answer(grammar) is grammar


def test_allowed_tokens() -> None:
    grammar = rules(allowed_token_ids=[3, 31, 32, 767]).answer()
    assert grammar is not None and not grammar.finished
    assert allowed(grammar.mask()) == {3, 31, 32, 767}
    assert grammar.accept(3) and allowed(grammar.mask()) == {3, 31, 32, 767}


def test_a_bad_word_is_forbidden_where_it_would_be_complete() -> None:
    """Its last token, behind the others; and of one token anywhere."""
    long, short = TOKENIZER.encode("Parisian"), TOKENIZER.encode("a")
    assert len(long) > 1 and len(short) == 1
    grammar = rules(bad_words=["Parisian", "a"]).answer()
    assert grammar is not None
    everything = set(range(VOCABULARY))
    never = {short[0], TOKENIZER.encode(" a")[0]}
    assert allowed(grammar.mask()) == everything - never
    for token in long[:-1]:
        assert token in allowed(grammar.mask())
        grammar.accept(token)
    assert allowed(grammar.mask()) == everything - never - {long[-1]}
    grammar.accept(short[0])
    assert allowed(grammar.mask()) == everything - never


def test_both_beside_a_grammar() -> None:
    """Only what all of them allow; the grammar goes on and ends as it would alone."""
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY)
    digits = [TOKENIZER.encode(str(d))[0] for d in range(10)]
    params = StructuredOutputsParams(regex="[0-4][0-9]")
    grammar = rules(allowed_token_ids=digits[2:], bad_words=["3"]).answer(compiler.compile(params))
    assert grammar is not None
    assert allowed(grammar.mask()) == {digits[2], digits[4]}
    assert grammar.accept(digits[4]) and grammar.accept(digits[9])
    assert grammar.wait(30) and grammar.finished and grammar.error is None
    compiler.close()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": [" "]}, "bad_words must have no text of white space"),
        ({"allowed_token_ids": [767, 768]}, r"allowed_token_ids has token ids \[768\]"),
        ({"logprob_token_ids": [5, 10**9]}, r"logprob_token_ids has token ids \[1000000000\]"),
    ],
)
def test_what_the_vocabulary_has_not(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        answer(llm, **params)


def test_answers_have_allowed_tokens_only(llm: LLM) -> None:
    found = answer(llm, **GREEDY, allowed_token_ids=[5, 6, 7])
    assert set(found.token_ids) <= {5, 6, 7} and len(found.token_ids) == 20 and found.finish_reason == "length"
    drawn = answer(llm, max_tokens=20, seed=1, top_k=0, allowed_token_ids=[5, 6, 7, EOS])
    assert set(drawn.token_ids) <= {5, 6, 7, EOS}
    assert drawn.token_ids == answer(llm, max_tokens=20, seed=1, top_k=0, allowed_token_ids=(7, 6, 5, EOS)).token_ids


def test_answers_do_not_have_bad_words(llm: LLM) -> None:
    """A word that the answer had: of one token, and of two."""
    plain = answer(llm, **GREEDY)
    tokenizer = llm.tokenizer
    pairs = [(i, tokenizer.decode(plain.token_ids[i : i + 2])) for i in range(19)]
    index, word = next((i, w) for i, w in pairs if w == w.strip() and tokenizer.encode(w) == plain.token_ids[i : i + 2])
    found = answer(llm, **GREEDY, bad_words=[word])
    assert found.token_ids[: index + 1] == plain.token_ids[: index + 1]
    assert found.token_ids[index + 1] != plain.token_ids[index + 1] and word not in found.text
    one = tokenizer.decode(plain.token_ids[:1]).strip()
    assert answer(llm, **GREEDY, bad_words=[one]).token_ids[0] != plain.token_ids[0]


def test_where_nothing_is_allowed_the_request_ends_with_an_error(llm: LLM) -> None:
    found = answer(llm, allowed_token_ids=[EOS], min_tokens=2, max_tokens=5)
    assert found.finish_reason == "error" and "allowed_token_ids" in (found.error or "")
    assert len(answer(llm, **GREEDY).token_ids) == 20


def test_n_answers_each_go_their_own_way(llm: LLM) -> None:
    (output,) = llm.generate(
        PROMPT, SamplingParams(n=3, seed=3, max_tokens=10, top_k=0, ignore_eos=True, allowed_token_ids=range(40, 60))
    )
    tokens = [choice.token_ids for choice in output.outputs]
    assert len({tuple(t) for t in tokens}) == 3 and all(set(t) <= set(range(40, 60)) for t in tokens)


def test_speculation_and_neighbours_do_not_matter(directory: Path, llm: LLM) -> None:
    params = SamplingParams(**GREEDY, bad_words=["a", "e"], allowed_token_ids=range(60))
    alone = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    free = llm.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0].token_ids
    with LLM(directory, "reference", num_speculative_tokens=3) as other:
        both = other.generate([PROMPT, PROMPT], [params, SamplingParams(**GREEDY)])
    assert [output.outputs[0].token_ids for output in both] == [alone, free]
    assert CoreConfig().num_speculative_tokens == 0
