"""/v1/chat/completions: from a body to what the engine is asked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from flint_runtime.chat.call_grammar import call_grammar
from flint_runtime.chat.parser import GlmParser
from flint_runtime.chat.template import template_options
from flint_runtime.chat.tools import FunctionTool, NamedTool, ToolChoice, parse_tool_choice, parse_tools
from flint_runtime.errors import UsageError
from flint_runtime.sampling_params import StructuredOutputsParams
from flint_runtime.server.chat_format import ChatFormat
from flint_runtime.server.endpoint import Plan
from flint_runtime.server.errors import ErrorReply
from flint_runtime.server.protocol.chat import ChatRequest
from flint_runtime.server.protocol.common import sampling_params, structured_outputs
from flint_runtime.server.service import Service
from flint_runtime.tokenizer import Tokenizer


class ChatApi:
    """An `endpoint.Api`."""

    model = ChatRequest
    id_prefix = "chatcmpl-"

    def plan(self, service: Service, body: ChatRequest, request_id: str) -> Plan:
        """See `endpoint.Api`."""
        service.check_model(body.model)
        body.refuse_unserved()
        tools, choice = request_tools(body)
        params = sampling_params(
            body,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=_logprobs(body),
            structured=_structured(body, tools, choice),
        )
        if body.stream and body.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs must be left out of a stream.")
        return Plan(
            prompts=[chat_prompt(service, body, tools, choice)],
            params=params,
            stream=bool(body.stream),
            make_format=partial(
                ChatFormat,
                request_id=request_id,
                created=int(time.time()),
                model=service.settings.model_names[0] if body.model is None else body.model,
                body=body,
                named_call=isinstance(choice, NamedTool),
            ),
            make_parser=parser_maker(service.llm.tokenizer, tools, choice),
        )

    def error_body(self, error: ErrorReply) -> bytes:
        """See `endpoint.Api`."""
        return error.body()


def _structured(
    body: ChatRequest, tools: Mapping[str, FunctionTool], choice: ToolChoice
) -> StructuredOutputsParams | None:
    """What the answer must match: what the body asks for, else what its tools allow. Raises UsageError."""
    wanted = structured_outputs(body)
    if wanted is None:
        calls = call_grammar(tools, choice, parallel=body.parallel_tool_calls is not False)
        return None if calls is None else StructuredOutputsParams(calls=calls)
    if choice not in ("none", "auto"):
        raise UsageError("tool_choice must not require a call where response_format or structured_outputs is given.")
    return wanted


def request_tools(body: ChatRequest) -> tuple[dict[str, FunctionTool], ToolChoice]:
    """The tools of a request, and which of them may be called. Raises UsageError."""
    for name in ("functions", "function_call"):
        if getattr(body, name) is not None:
            raise UsageError(f"{name} must be left out: use tools and tool_choice.")
    tools = parse_tools(body.tools or [])
    return tools, parse_tool_choice(body.tool_choice, tools)


def parser_maker(tokenizer: Tokenizer, tools: Mapping[str, FunctionTool], choice: ToolChoice) -> Any:
    """Makes the parser of one answer; see `generation.MakeParser`."""

    def make(thinking: bool) -> GlmParser:
        return GlmParser(tokenizer, tools, thinking=thinking, calls=choice != "none")

    return make


def chat_prompt(
    service: Service, body: ChatRequest, tools: Mapping[str, FunctionTool], choice: ToolChoice
) -> str | list[int]:
    """The prompt of a conversation: its text, or its token ids where it is to be cut. Raises UsageError."""
    if body.chat_template is not None:
        # A template is a program: a stranger's could run for ever.
        raise UsageError("chat_template must be left out: the server's own is used (--chat-template).")
    tokenizer, settings = service.llm.tokenizer, service.settings
    hidden = choice == "none" and settings.exclude_tools_when_tool_choice_none
    shown = [] if hidden else [dict(tool.definition) for tool in tools.values()]
    continued = bool(body.continue_final_message)
    added = body.add_generation_prompt
    text = tokenizer.render_chat(
        body.messages,
        shown or None,
        chat_template=settings.chat_template,
        add_generation_prompt=not continued if added is None else added,
        continue_final_message=continued,
        **template_options(
            body.chat_template_kwargs,
            reasoning_effort=body.reasoning_effort,
            defaults=settings.default_chat_template_kwargs,
        ),
    )
    return cut_prompt(service, text, body.truncate_prompt_tokens)


def cut_prompt(service: Service, prompt: str | list[int], most: int | None) -> str | list[int]:
    """A prompt's last `most` tokens; -1: as many as the context holds. Raises UsageError."""
    if most is None:
        return prompt
    limit = service.llm.max_model_len - 1
    if most == -1:
        most = limit
    if not 1 <= most <= limit:
        raise UsageError(f"truncate_prompt_tokens must be -1 or from 1 to {limit}, found {most}.")
    ids = service.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return ids[-most:]


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs to be true.")
    return (body.top_logprobs or 0) if body.logprobs and body.logprob_token_ids is None else None
