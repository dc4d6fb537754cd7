"""LLM: prompts of every form, progress, and what is left behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import flint_runtime
from flint_runtime.errors import UsageError
from flint_runtime.llm import LLM
from flint_runtime.sampling_params import SamplingParams
from tests.runtime.fake_core import TOKENIZER, FakeCore, fake_engine


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
    with pytest.raises(UsageError, match="chat template rejects"):
        llm.chat([{"role": "user", "content": {"not JSON": object()}}])


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
    """`from flint_runtime import LLM` needs no torch; the package alone neither numpy, and at most 0.3 s."""
    code = "import sys; from flint_runtime import LLM, AsyncLLM, SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import time; t = time.perf_counter(); import flint_runtime; print(time.perf_counter() - t)"
    seconds = [float(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout) for _ in range(3)]
    assert min(seconds) < 0.3
    with pytest.raises(AttributeError, match="Unknown"):
        _ = flint_runtime.Unknown
