"""LLM: prompts of every form, progress, and what is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flint_runtime
from flint_runtime.async_llm import AsyncLLM
from flint_runtime.errors import UsageError
from flint_runtime.llm import LLM
from flint_runtime.request import EngineRequest
from flint_runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fake_core import TOKENIZER, FakeCore, echo, fake_engine
from tests.shapes import NANO_DIRECTORY


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def llm(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("flint_runtime.llm_engine.LLMEngine.open", lambda *_: fake_engine(core))
    return LLM("anywhere")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("one", ["one"]),
        (["one", "a longer one"], ["one", "a longer one"]),
        (TOKENIZER.encode("ids"), ["ids"]),
        ([TOKENIZER.encode("ids"), TOKENIZER.encode("more")], ["ids", "more"]),
        (["text", TOKENIZER.encode("ids")], ["text", "ids"]),
        ({"prompt": "text"}, ["text"]),
        ([{"prompt_token_ids": TOKENIZER.encode("ids")}, {"prompt": "text"}], ["ids", "text"]),
        (np.array(TOKENIZER.encode("ids")), ["ids"]),
        ([], []),
    ],
)
def test_prompts(llm: LLM, prompts: Any, expected: list[str]) -> None:
    """Answers come in the order of the prompts, however long each takes."""
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == expected and all(o.finished for o in outputs)


def test_parameters_for_all_or_one_each(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1)
    one, two = llm.generate(["Paris Rome"] * 2, [short, SamplingParams()])
    assert (one.outputs[0].text, two.outputs[0].text) == ("Paris", "Paris Rome")
    assert [o.outputs[0].text for o in llm.generate(["Paris Rome"] * 2, short)] == ["Paris"] * 2
    with pytest.raises(UsageError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], [short])


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    (output,) = llm.chat(conversation, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    assert output.prompt == TOKENIZER.render_chat(conversation, [tool], enable_thinking=False)
    assert len(llm.chat([conversation, conversation])) == 2
    assert llm.chat([]) == []


def test_chat_options_reach_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    (output,) = llm.chat(conversation, None, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == TOKENIZER.render_chat(conversation, add_generation_prompt=False)
    (output,) = llm.chat(conversation[:1], chat_template="{{ messages[0].content }}!{{ params }}",
                         chat_template_kwargs={"params": 1})  # fmt: skip
    assert output.prompt == "hi!1"


def test_chat_options_reach_the_template_from_asyncio(core: FakeCore) -> None:
    async def main() -> tuple[str | None, str | None]:
        with AsyncLLM.from_factory(lambda: fake_engine(core)) as llm:
            conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
            template = "{{ params }}{{ messages[0].content }}"
            outputs = [
                output
                async for output in llm.chat(conversation, add_generation_prompt=False, continue_final_message=True)
            ]
            options = {"chat_template": template, "chat_template_kwargs": {"params": 1}}
            more = [output async for output in llm.chat(conversation, **options)]
            for wrong in ({"messages": 1}, {"tools": []}, "x"):
                with pytest.raises(UsageError, match="chat_template_kwargs"):
                    await llm.prepare_chat(conversation, chat_template_kwargs=wrong)
            with pytest.raises(UsageError, match="messages must be"):
                await llm.prepare_chat("hi")  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="prompt must be"):
                await llm.prepare(b"hi")  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="sampling_params must be"):
                await llm.prepare("hi", {"temperature": 0})  # type: ignore[arg-type]
            return outputs[-1].prompt, more[-1].prompt

    first, second = asyncio.run(main())
    assert first is not None and first.endswith("Well") and second == "1hi"


@pytest.mark.parametrize(
    "messages",
    ["hi", b"hi", None, 5, {"role": "user", "content": "hi"}, ["hi"], [[]], [["hi"]], [[{"content": "hi"}]], [5],
     [{"role": "user", "content": "a"}, [{"role": "user", "content": "b"}]], [{"content": "hi"}]],
)  # fmt: skip
def test_what_is_no_conversation(llm: LLM, core: FakeCore, messages: Any) -> None:
    with pytest.raises(UsageError, match="message"):
        llm.chat(messages)
    assert not core.running and not core.steps


@pytest.mark.parametrize("prompts", [None, b"hi", 5, [b"hi"], [None], {"text": "hi"}, ["a", None], "\ud800", [[1.5]]])
def test_what_is_no_prompt(llm: LLM, core: FakeCore, prompts: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        llm.generate(prompts)
    assert not core.running and not core.steps


@pytest.mark.parametrize("params", [5, "x", {}, [None, 5], [SamplingParams(), {}], object()])
def test_what_are_no_parameters(llm: LLM, core: FakeCore, params: Any) -> None:
    with pytest.raises(UsageError, match="sampling_params"):
        llm.generate(["a", "b"], params)
    assert not core.running and not core.steps


def test_a_dict_prompt_may_name_the_text_of_its_ids(llm: LLM) -> None:
    (output,) = llm.generate({"prompt": "what it says", "prompt_token_ids": TOKENIZER.encode("ids")})
    assert (output.prompt, output.outputs[0].text) == ("what it says", "ids")


def test_only_whole_answers_return(llm: LLM) -> None:
    for kind in RequestOutputKind:
        (output,) = llm.generate("Paris Rome", SamplingParams(output_kind=kind))
        assert output.outputs[0].text == "Paris Rome" and output.outputs[0].finished()


def test_default_sampling_params(llm: LLM) -> None:
    found = llm.get_default_sampling_params()
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (1.0, 0.95, 20, None)
    assert llm.get_tokenizer() is llm.tokenizer is TOKENIZER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model must be"), ({"model": 5}, "model must be"),
        ({"model": "\ud800"}, "model must be"), ({"model": "a\0b"}, "model must be"),

        ({"executor": "gpu"}, "executor must be one of auto, "), ({"seed": "x"}, "seed must be"),
        ({"seed": True}, "seed must be"), ({"seed": 10**400}, "seed must be"),
        ({"tensor_parallel_size": 2}, "no option tensor_parallel_size; there are seed, max_num_seqs"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be"), ({"max_model_len": 0}, "max_model_len must be"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization must be"),
        ({"kv_cache_memory_bytes": 1.5}, "kv_cache_memory_bytes must be"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching must be"),
        ({"prefill_target_seconds": 10**400}, "prefill_target_seconds must be"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_wrong_options(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind(**{"model": "anywhere", **options})


def test_a_seed_makes_runs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all requests without a seed of their own, which differ from each other."""
    seeds: list[list[int | None]] = []

    def answer(request: EngineRequest) -> list[int]:
        seeds[-1].append(request.params.seed)
        return echo(request)

    monkeypatch.setattr("flint_runtime.llm_engine.EngineCore", lambda *_: FakeCore(answer))
    monkeypatch.setattr("flint_runtime.llm_engine.Engine.open", lambda _: SimpleNamespace(directory=NANO_DIRECTORY))
    executor = SimpleNamespace(config=SimpleNamespace(vocab_size=TOKENIZER.vocab_size), close=lambda: None)
    monkeypatch.setattr("flint_runtime.llm_engine.open_executor", lambda *_: executor)
    for seed in (5, 5, 6, None, None):
        seeds.append([])
        LLM("anywhere", seed=seed).generate(
            ["a", "b", "c"], [SamplingParams(), SamplingParams(seed=1), SamplingParams()]
        )
    assert seeds[0] == seeds[1] and all(run[1] == 1 and run[0] != run[2] for run in seeds)
    assert len({run[0] for run in seeds}) == 4


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    assert "2 requests in" in capsys.readouterr().err
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_nothing_is_left_behind(llm: LLM, core: FakeCore) -> None:
    """By a request that cannot be served, or by Ctrl-C in the middle."""
    with pytest.raises(UsageError, match="prompt is empty"):
        llm.generate(["fine", ""])
    assert not core.running
    core.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"])
    core.fail = None
    assert not core.running and llm.generate("next")[0].outputs[0].text == "next"


def test_import_is_light() -> None:
    """`from flint_runtime import LLM` needs no torch; the package alone neither numpy, and little time."""
    code = "import sys; from flint_runtime import LLM, AsyncLLM, SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import time; t = time.perf_counter(); import flint_runtime; print(time.perf_counter() - t)"
    seconds = [float(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout) for _ in range(3)]
    assert min(seconds) < 1
    with pytest.raises(AttributeError, match="Unknown"):
        _ = flint_runtime.Unknown
