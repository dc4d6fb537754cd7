"""Generation of one sequence over the reference executor, on a random model of flint-nano's shape."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flint_runtime.errors import UsageError
from flint_runtime.executors.reference import ReferenceExecutor
from flint_runtime.generate import GeneratedToken, Generator, NonFiniteLogitsError
from flint_runtime.manifest import Limits
from flint_runtime.sampling_params import SamplingParams
from flint_runtime.tokenizer import Tokenizer
from tests.runtime.engines import Place, build_reference_engine, feed, open_poisoned
from tests.tools.checkpoints import flint_config, random_checkpoint

CONTEXT = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = list(range(40, 90))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of each kind; window 33; prefill in chunks of 16."""
    directory = tmp_path_factory.mktemp("engine")
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = flint_config(
        layers=3, hidden=128, experts=8, heads=4, kv_heads=2, head_dim=128, intermediate=128, moe_intermediate=64,
        shared_intermediate=64, vocab=768, window=33, context=4096, layer_types=kinds, mlp_only_layers=[0],
    )  # fmt: skip
    checkpoint = random_checkpoint(directory / "model", config, "bf16", seed=5)
    limits = Limits(max_batch=2, max_context=CONTEXT, prefill_chunk=16)
    return build_reference_engine(checkpoint, directory / "engine", limits)


@pytest.fixture
def generator(engine: Path) -> Generator:
    """A generator whose executor has not allocated anything yet."""
    return Generator(ReferenceExecutor.open(engine), Tokenizer(engine))


def ids(tokens: Iterator[GeneratedToken]) -> list[int]:
    """Token ids of a generation."""
    return [token.token_id for token in tokens]


def test_greedy_takes_the_best_of_every_prefix(engine: Path, generator: Generator) -> None:
    found = list(generator.generate(PROMPT, GREEDY))
    executor = open_poisoned(engine)
    logits = feed(executor, Place(executor), PROMPT + [t.token_id for t in found][:-1], 16)[len(PROMPT) - 1 :]
    assert [t.token_id for t in found] == logits.argmax(-1).tolist()
    exact = torch.from_numpy(logits).log_softmax(-1).max(-1).values
    np.testing.assert_allclose([t.logprob for t in found], exact, atol=1e-4)
    assert [t.finish_reason for t in found] == [None] * 19 + ["length"]


def test_text_is_that_of_the_ids(engine: Path, generator: Generator) -> None:
    tokens = list(generator.generate("Hello, world", SamplingParams(seed=1, max_tokens=40, ignore_eos=True)))
    assert "".join(t.text for t in tokens) == Tokenizer(engine).decode([t.token_id for t in tokens])


def test_a_generator_can_be_used_again(generator: Generator) -> None:
    first = ids(generator.generate(PROMPT, GREEDY))
    assert ids(generator.generate(PROMPT[:3], GREEDY)) != first
    assert ids(generator.generate(PROMPT, GREEDY)) == first


def test_seed(generator: Generator) -> None:
    runs = [ids(generator.generate(PROMPT, SamplingParams(seed=s, max_tokens=20, ignore_eos=True))) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    unseeded = [ids(generator.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens(generator: Generator, ignore_eos: bool) -> None:
    """stop_token_ids end a generation, ignore_eos or not; the stop token is the last one."""
    every = ids(generator.generate(PROMPT, GREEDY))
    stop = every[7]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=ignore_eos, stop_token_ids=(stop,))
    tokens = list(generator.generate(PROMPT, params))
    assert [t.token_id for t in tokens] == every[: every.index(stop) + 1]
    assert tokens[-1].finish_reason == "stop"


def test_eos(engine: Path) -> None:
    tokenizer = Tokenizer(engine)
    generator = Generator(ReferenceExecutor.open(engine), tokenizer)
    every = ids(generator.generate(PROMPT, GREEDY))
    tokenizer.eos_token_ids = (every[4],)
    tokens = list(generator.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20)))
    assert len(tokens) == every.index(every[4]) + 1 and tokens[-1].finish_reason == "stop"
    assert ids(generator.generate(PROMPT, GREEDY)) == every


def test_penalties_see_prompt_and_output(generator: Generator) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, repetition_penalty=1e6)
    found = ids(generator.generate(PROMPT, params))
    assert len(set(found)) == 30 and not set(found) & set(PROMPT)


def test_context_limit(generator: Generator) -> None:
    """K7: exactly at and one below the limit is served, one above is refused at once."""
    for extra in (-1, 0):
        params = SamplingParams(temperature=0.0, max_tokens=CONTEXT - len(PROMPT) + extra, ignore_eos=True)
        assert len(list(generator.generate(PROMPT, params))) == CONTEXT - len(PROMPT) + extra
    with pytest.raises(UsageError, match=r"max_tokens is 51.*context of 100 tokens.*Lower max_tokens to 50"):
        generator.generate(PROMPT, SamplingParams(max_tokens=CONTEXT - len(PROMPT) + 1))
    full = [*PROMPT, *PROMPT]
    tokens = list(generator.generate(full[:-1], SamplingParams(max_tokens=1)))
    assert len(tokens) == 1
    with pytest.raises(UsageError, match="prompt has 100 tokens; this engine's context is 100"):
        generator.generate(full, SamplingParams(max_tokens=1))


def test_without_max_tokens_the_context_is_the_end(generator: Generator) -> None:
    tokens = list(generator.generate(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True)))
    assert len(tokens) == CONTEXT - len(PROMPT) and tokens[-1].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[], "", [768], [-1]])
def test_prompts_that_cannot_be_served(generator: Generator, prompt: str | list[int]) -> None:
    with pytest.raises(UsageError, match="prompt"):
        generator.generate(prompt, GREEDY)


def test_non_finite_logits_are_an_error(engine: Path) -> None:
    executor = ReferenceExecutor.open(engine)
    executor._weights["head.norm"] = executor._weights["head.norm"] * torch.nan
    with pytest.raises(NonFiniteLogitsError, match="not finite"):
        list(Generator(executor, Tokenizer(engine)).generate(PROMPT, GREEDY))


def test_torch_is_imported_by_the_reference_executor_only() -> None:
    """The GPU path has no torch."""
    modules = "flint_runtime.generate, flint_runtime.tokenizer, flint_runtime.executors.base"
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
