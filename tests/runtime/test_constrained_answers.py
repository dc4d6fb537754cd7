"""Calls, schemas and the thinking budget from LLMEngine down, over an executor whose draws mean nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from flint_runtime.chat.call_grammar import call_grammar
from flint_runtime.chat.tools import NamedTool, ToolChoice, parse_tools
from flint_runtime.engine_core import CoreConfig, EngineCore
from flint_runtime.llm_engine import LLMEngine
from flint_runtime.outputs import CompletionOutput
from flint_runtime.sampling_params import SamplingParams, StructuredOutputsParams
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.test_engine_core import LIMITS
from tests.runtime.test_structured import TOKENIZER
from tests.shapes import NANO

TOOLS = parse_tools(
    [
        {"type": "function", "function": {"name": "now"}},
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        },
    ]
)
THINK_END = TOKENIZER.thinking_end_id or -1
CALL = r"<tool_call>(now|add\n?(<arg_key>n</arg_key>\n?<arg_value>-?[0-9]+</arg_value>)?)\n?</tool_call>"


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    executor = FakeExecutor(LIMITS, NANO.model_copy(update={"vocab_size": TOKENIZER.vocab_size}))
    core = EngineCore(executor, CoreConfig(max_num_seqs=8, kv_cache_memory_bytes=1 << 24))
    engine = LLMEngine(core, executor, TOKENIZER)
    yield engine
    engine.close()


def answers(engine: LLMEngine, prompt: str, params: SamplingParams) -> list[CompletionOutput]:
    engine.add_request(engine.prepare("a", prompt, params))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output.outputs
    raise AssertionError("no last output")


def sampled(structured: StructuredOutputsParams | None, budget: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        seed=3,
        n=4,
        max_tokens=400,
        structured_outputs=structured,
        thinking_token_budget=budget,
        skip_special_tokens=True,
    )


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("choice", ["required", NamedTool("add")])
def test_g9_calls_that_must_be(engine: LLMEngine, choice: ToolChoice, budget: int) -> None:
    """Behind the thinking part nothing but calls, at least one; a named choice is that one, once."""
    structured = StructuredOutputsParams(calls=call_grammar(TOOLS, choice, parallel=False))
    for answer in answers(engine, "<|user|>x<|assistant|><think>", sampled(structured, budget)):
        tokens = list(answer.token_ids)
        assert tokens.index(THINK_END) <= budget
        text = TOKENIZER.decode(tokens[tokens.index(THINK_END) + 1 :], False).strip()
        assert answer.finish_reason == "stop" and re.fullmatch(CALL, text), text
        assert isinstance(choice, str) or text.startswith("<tool_call>add")


@pytest.mark.parametrize("budget", [0, 6])
def test_g12_a_schema_behind_the_thinking_part(engine: LLMEngine, budget: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    structured = StructuredOutputsParams(json={**schema, "additionalProperties": False})
    for answer in answers(engine, "<|user|>x<|assistant|><think>", sampled(structured, budget)):
        tokens = list(answer.token_ids)
        text = TOKENIZER.decode(tokens[tokens.index(THINK_END) + 1 :])
        assert tokens.index(THINK_END) <= budget and json.loads(text)["a"] in (True, False)


def test_a_budget_without_a_grammar(engine: LLMEngine) -> None:
    for answer in answers(engine, "<think>", sampled(None, 6)):
        tokens = list(answer.token_ids)
        assert THINK_END in tokens[:7] or answer.finish_reason == "stop"
    for answer in answers(engine, "<think></think>", sampled(None, 0)):
        assert answer.token_ids[0] != THINK_END
