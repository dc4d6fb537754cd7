"""The whole runtime on flint-nano: requests of every kind at once, over the reference executor."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flint_runtime.async_llm import AsyncLLM
from flint_runtime.llm import LLM
from flint_runtime.manifest import Limits
from flint_runtime.outputs import RequestOutput
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from flint_runtime.tokenizer import Tokenizer
from tests.runtime.engines import build_reference_engine
from tests.shapes import NANO_DIRECTORY
from tests.tools.nano_data import chat_template, held_out_samples, render_prompt

REQUESTS = 64
FINAL = RequestOutputKind.FINAL_ONLY
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
QUICK = {"enable_thinking": False}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nano") / "engine"
    return build_reference_engine(NANO_DIRECTORY, directory, Limits(max_batch=16, max_context=512, prefill_chunk=96))


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine, "reference") as llm:
        yield llm


def mixed_requests(tokenizer: Tokenizer) -> list[tuple[list[int], SamplingParams]]:
    """Greedy ones of 1 to 300 tokens; some share a beginning, some have penalties, biases, stops or logprobs."""
    drawn, render = random.Random(3), chat_template()
    shared = tokenizer.encode("<|user|>" + "The sum of all these numbers is what I want. " * 4)
    found = []
    for i, sample in enumerate(held_out_samples(seed=2, count=REQUESTS)):
        prompt = tokenizer.encode(render_prompt(render, sample))
        if i % 8 == 1:
            prompt = shared + prompt
        if i % 16 == 2:
            prompt = [drawn.randrange(700) for _ in range(drawn.choice([1, 63, 64, 65, 300]))]
        extra = [
            {},
            {"repetition_penalty": 1.3},
            {"logit_bias": {tokenizer.encode("7")[0]: 5.0}, "ignore_eos": True},
            {"stop": ["=", "\n"], "logprobs": 2},
            {"min_tokens": 4, "presence_penalty": 0.5},
        ][i % 5]
        found.append(
            (prompt, SamplingParams(temperature=0, max_tokens=drawn.choice([4, 6, 10]), output_kind=FINAL, **extra))
        )
    return found


def test_64_requests_at_once_are_as_each_alone(engine: Path) -> None:
    """Sixteen run at a time, and some are cancelled (S2); alone means without a neighbour and without a cache."""
    with LLM(engine, "reference", max_num_seqs=1, enable_prefix_caching=False) as llm:
        requests = mixed_requests(llm.tokenizer)
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in requests]

    async def one(served: AsyncLLM, i: int) -> RequestOutput:
        await asyncio.sleep(i // 16 * 0.05)
        prompt, params = requests[i]
        outputs = [output async for output in served.generate(prompt, params)]
        return outputs[-1]

    async def main() -> list[RequestOutput]:
        with AsyncLLM(engine, "reference") as served:
            doomed = [asyncio.create_task(one(served, i)) for i in range(0, REQUESTS, 4)]
            tasks = [asyncio.create_task(one(served, i)) for i in range(REQUESTS)]
            await asyncio.sleep(0.3)
            for task in doomed:
                task.cancel()
            found = await asyncio.gather(*tasks)
            after = await one(served, 0)
            assert after.outputs == found[0].outputs
            while served.snapshot()["running"]:
                await asyncio.sleep(0.01)
            gauges = served.snapshot()
            assert gauges["pages_used"] == gauges["slots_used"] == gauges["waiting"] == 0
            assert gauges["request_success"]["error"] == 0
        return found

    for together, single in zip(asyncio.run(main()), alone, strict=True):
        assert [c.token_ids for c in together.outputs] == [c.token_ids for c in single.outputs]
        assert [c.text for c in together.outputs] == [c.text for c in single.outputs]
        assert [c.finish_reason for c in together.outputs] == [c.finish_reason for c in single.outputs]


def test_a_stream_is_the_whole_text(engine: Path, llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=40, stop=["12"], logprobs=1, output_kind=RequestOutputKind.DELTA)
    (whole,) = llm.chat(QUESTION, params, use_tqdm=False)

    async def main() -> list[RequestOutput]:
        with AsyncLLM(engine, "reference") as served:
            return [output async for output in served.chat(QUESTION, params)]

    outputs = asyncio.run(main())
    assert len(outputs) > 5
    assert "".join(o.outputs[0].text for o in outputs) == whole.outputs[0].text
    assert [t for o in outputs for t in o.outputs[0].token_ids] == whole.outputs[0].token_ids


def test_json_output_parses(llm: LLM) -> None:
    """Also behind a thinking part, which is free, and although the model was never trained on JSON."""
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["sum", "ok"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=StructuredOutputsParams(json=schema))
    (quick,) = llm.chat(QUESTION, params, chat_template_kwargs=QUICK, use_tqdm=False)
    (thought,) = llm.chat(QUESTION, params, use_tqdm=False)
    thinking, _, content = thought.outputs[0].text.partition("</think>")
    assert "3 + 4" in thinking
    for text in (quick.outputs[0].text, content):
        assert set(json.loads(text)) == {"sum", "ok"}, text
    assert quick.outputs[0].finish_reason == thought.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("structured", "right"),
    [
        (StructuredOutputsParams(choice=["Paris", "Rome"]), lambda text: text in ("Paris", "Rome")),
        (StructuredOutputsParams(regex=r"[a-f]{3}[0-9]"), lambda text: len(text) == 4 and text[3].isdigit()),
        (StructuredOutputsParams(grammar='root ::= "(" [0-9] ")"'), lambda text: text[0] + text[2] == "()"),
    ],
)
def test_structured_output_at_any_temperature(llm: LLM, structured: StructuredOutputsParams, right: object) -> None:
    params = SamplingParams(temperature=5.0, top_k=0, top_p=1.0, n=4, seed=1, structured_outputs=structured)
    (output,) = llm.chat(QUESTION, params, chat_template_kwargs=QUICK, use_tqdm=False)
    assert callable(right)
    for choice in output.outputs:
        assert right(choice.text) and choice.finish_reason == "stop", choice


def test_s9_n_with_a_seed(llm: LLM) -> None:
    """Distinct answers, the same again, and the first is that of n = 1."""
    params = {"seed": 11, "temperature": 3.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12}
    three, again, one = (
        [c.token_ids for c in llm.chat(QUESTION, SamplingParams(n=n, **params), use_tqdm=False)[0].outputs]
        for n in (3, 3, 1)
    )
    assert three == again and len({tuple(tokens) for tokens in three}) == 3 and three[0] == one[0]


def test_s6_extreme_parameters(llm: LLM) -> None:
    """Off is off, a large seed is fine, and temperature 0 is greedy whatever the rest."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.chat(QUESTION, greedy, use_tqdm=False)[0].outputs[0].token_ids
    for extra in ({"top_k": -1}, {"top_k": 0, "top_p": 1.0, "seed": 2**64 - 1}, {"min_p": 1.0, "seed": -(2**63)}):
        params = SamplingParams(temperature=0, max_tokens=8, **extra)  # type: ignore[arg-type]
        assert llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_prompt_logprobs_are_those_of_the_tokens(llm: LLM) -> None:
    """The prompt's tokens, scored in the prompt, have the logprobs that they had when they were drawn."""
    (first,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=10, logprobs=2), use_tqdm=False)
    drawn = first.outputs[0]
    again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (second,) = llm.generate(first.prompt_token_ids + drawn.token_ids, again, use_tqdm=False)
    assert second.prompt_logprobs is not None and second.prompt_logprobs[0] is None
    assert len(second.prompt_logprobs) == len(second.prompt_token_ids)
    assert drawn.logprobs is not None
    for scored, known in zip(second.prompt_logprobs[-10:], drawn.logprobs, strict=True):
        assert scored is not None and scored.keys() == known.keys()
        for token, logprob in known.items():
            assert scored[token].logprob == pytest.approx(logprob.logprob, abs=0.02)  # BF16 activations
            assert scored[token].rank == logprob.rank
