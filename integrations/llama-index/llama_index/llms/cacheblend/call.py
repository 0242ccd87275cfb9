"""One call of the LLM: its messages in the OpenAI form, its arguments, the responses it makes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.tools.types import BaseTool

from cacheblend_rag import (
    Arguments,
    BlendConfig,
    ConfigError,
    Delta,
    Engine,
    Generation,
    PromptError,
    SamplingParams,
    TokenLogprob,
    ToolCall,
    names_of,
    read_arguments,
    read_hints,
    read_tool_choice,
)
from llama_index.llms.cacheblend.context import collecting, hints_in, publish

REPORT = "cacheblend"
ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
}
NOT_SHOWN = (ToolCallBlock, ThinkingBlock, CachePoint)
"""Content blocks that are left out of a message's text, as chat templates leave out reasoning."""
TOOL_CALLS = "tool_calls"
TOOL_CALL_ID = "tool_call_id"
TOOLS = {"tools", "tool_choice", "tool_required", "parallel_tool_calls"}
BLENDING = {"blend_config", "recompute_ratio", "hints"}
CALL = Arguments(
    "argument of a call",
    names_of(SamplingParams) | TOOLS | BLENDING | {"response_format", "top_logprobs"},
    {"blend_config": BlendConfig},
)
Response = TypeVar("Response", CompletionResponse, ChatResponse)


def sampling_of(arguments: Mapping[str, Any]) -> SamplingParams:
    """Return how an answer is sampled; a pydantic class as ``response_format`` is its schema."""
    form = arguments.get("response_format")
    if isinstance(form, type) and issubclass(form, BaseModel):
        schema = {"schema": form.model_json_schema()}
        arguments = {**arguments, "response_format": {"type": "json_schema", "json_schema": schema}}
    return SamplingParams.of_call(arguments)


def tools_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return TOOLS as fields of a ChatPrompt; raises CacheBlendError for a wrong one."""
    tools = arguments.get("tools", ())
    if isinstance(tools, str | Mapping | BaseTool) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools is a {type(tools).__name__}: give a list of tools")
    specs = [_spec(tool, index) for index, tool in enumerate(tools)]
    if not specs:
        return {}
    choice = arguments.get("tool_choice")
    if choice is None and arguments.get("tool_required"):
        choice = "required"
    return {
        "tools": specs,
        "tool_choice": read_tool_choice(choice, specs),
        "parallel_tool_calls": arguments.get("parallel_tool_calls", True),
    }


def _spec(tool: Any, index: int) -> dict[str, Any]:
    if isinstance(tool, BaseTool):
        return tool.metadata.to_openai_tool(skip_length_check=True)
    if isinstance(tool, Mapping):
        return dict(tool)
    raise ConfigError(
        f"tools[{index}] is a {type(tool).__name__}: give LlamaIndex's tools, such as "
        "FunctionTool.from_defaults(...) returns"
    )


@dataclass
class Call(Generic[Response]):
    """One request, and the responses that are made of its answer.

    Args:
        kind: of the responses.
        prompt: for the engine; text: what it says, where hinted chunks are looked for.
        hints: None for those of the query at hand.
    """

    kind: type[Response]
    engine: Engine
    prompt: Any
    text: str
    sampling: SamplingParams
    config: BlendConfig
    hints: Any = None
    collecting: Sequence[list[dict[str, Any]]] = field(default_factory=collecting)
    so_far: str = ""

    def answer(self) -> Response:
        """Return the whole response."""
        return self._whole(self.engine.generate(**self._asked()))

    async def aanswer(self) -> Response:
        """Return the whole response, off the event loop."""
        return self._whole(await self.engine.agenerate(**self._asked()))

    def steps(self) -> Generator[Response, None, None]:
        """Return the responses so far, as they grow; the last has the report and calls of tools."""
        return (self._step(delta) for delta in self.engine.stream(**self._asked()))

    async def asteps(self) -> AsyncGenerator[Response, None]:
        """Yield as ``steps``; the work stops as soon as the reader does."""
        async with aclosing(self.engine.astream(**self._asked())) as deltas:
            async for delta in deltas:
                yield self._step(delta)

    def _asked(self) -> dict[str, Any]:
        hints = hints_in(self.text) if self.hints is None else read_hints(self.hints)
        asked = {"prompt": self.prompt, "sampling": self.sampling, "config": self.config}
        return {**asked, "hints": tuple(hints)}

    def _whole(self, answer: Generation) -> Response:
        text = answer.content if self.kind is ChatResponse else answer.text
        return self._response(text, answer.tool_calls, self._told(answer))

    def _step(self, delta: Delta) -> Response:
        piece = delta.content if self.kind is ChatResponse else delta.text
        self.so_far += piece
        answer = delta.generation
        told = {} if answer is None else self._told(answer)
        calls = () if answer is None else answer.tool_calls
        return self._response(self.so_far, calls, {"delta": piece, **told})

    def _response(self, text: str, calls: Sequence[ToolCall], told: dict[str, Any]) -> Response:
        if self.kind is ChatResponse:
            return self.kind(message=_message(text, calls), **told)
        return self.kind(text=text, **told)

    def _told(self, answer: Generation) -> dict[str, Any]:
        """Publish the report; return what a response says beside its text."""
        report = answer.report.to_dict()
        publish(report, self.collecting)
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "total_tokens": answer.prompt_tokens + len(answer.token_ids),
            "cached_tokens": answer.report.reused_tokens,
        }
        raw = {**usage, "usage": usage, "finish_reason": answer.openai_finish_reason}
        told: dict[str, Any] = {"raw": raw, "additional_kwargs": {REPORT: report}}
        if answer.logprobs is not None:
            raw["logprobs"] = {"content": [one.to_openai() for one in answer.logprobs]}
            told["logprobs"] = [_logprobs(one) for one in answer.logprobs]
        return told


def _message(text: str, calls: Iterable[ToolCall]) -> ChatMessage:
    """Return an assistant's message; calls of tools also in OpenAI's form: LlamaIndex reads it."""
    blocks: list[ContentBlock] = [
        ToolCallBlock(
            tool_call_id=one.id,
            tool_name=one.name,
            tool_kwargs=one.arguments if (read := read_arguments(one)) is None else read,
        )
        for one in calls
    ]
    more = {TOOL_CALLS: [one.to_openai() for one in calls]} if blocks else {}
    if text or not blocks:
        blocks.insert(0, TextBlock(text=text))
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more)


def _logprobs(token: TokenLogprob) -> list[LogProb]:
    """Return the token of the answer, then the most likely others in its place."""
    others = [(text, value) for name, text, value in token.top if name != token.token_id]
    return [
        LogProb(token=text, logprob=value, bytes=list(text.encode()))
        for text, value in [(token.token, token.logprob), *others]
    ]


# Messages in the OpenAI form: a role, one text, and calls of tools or whose result it is


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the OpenAI form; raises PromptError when one holds an image or the like.

    Calls of tools are read from the blocks or, for other LLMs' messages, from additional_kwargs.
    """
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: ChatMessage, index: int) -> dict[str, Any]:
    for block in message.blocks:
        if not isinstance(block, (TextBlock, *NOT_SHOWN)):
            raise PromptError(
                f"messages[{index}] holds a block of type {block.block_type!r}: only text is served"
            )
    role = ROLES.get(message.role, message.role.value)
    plain: dict[str, Any] = {"role": role, "content": message.content or ""}
    if role == "assistant" and (calls := _calls(message)):
        plain[TOOL_CALLS] = calls
    if role == "tool" and (call_id := message.additional_kwargs.get(TOOL_CALL_ID)):
        plain[TOOL_CALL_ID] = call_id
    return plain


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    told = [
        ToolCall(one.tool_call_id or "", one.tool_name, _text(one.tool_kwargs)).to_openai()
        for one in message.blocks
        if isinstance(one, ToolCallBlock)
    ]
    given = message.additional_kwargs.get(TOOL_CALLS) or ()
    return told or [one if isinstance(one, dict) else one.model_dump() for one in given]


def _text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
