"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked, Pieces, usage
from cacheblend_rag.api.logprobs import chat_logprobs
from cacheblend_rag.api.openai_errors import ApiError, bad_field
from cacheblend_rag.api.serving import Serving
from cacheblend_rag.api.sources import extra_of
from cacheblend_rag.api.wire import DONE, event
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.text.chat import ChatPrompt
from cacheblend_rag.text.tools import ToolCall, ToolChoice


class Message(fields.Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message for the model's chat template."""
        told = self.model_dump(include=set(type(self).model_fields), exclude_none=True)
        return {**told, "role": "system" if self.role == "developer" else self.role}


class ChatRequest(fields.Request):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None

    def prompt(self) -> ChatPrompt:
        """Return the prompt; raises PromptError for a malformed tool or choice."""
        messages = [message.plain() for message in self.messages]
        tools = self.tools or []
        return ChatPrompt(messages, tools, cast(ToolChoice, self.tool_choice or "auto"))

    @property
    def told_logprobs(self) -> int | None:
        """How many alternatives are told for each token; None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None


async def respond(serving: Serving, request: HttpRequest, body: ChatRequest) -> Response:
    """Answer a request; raises ApiError."""

    async def ask() -> Asked:
        serving.check_model(body.model)
        body.check()
        if body.echo:
            raise bad_field("echo", "is for /v1/completions: leave it out")
        sampling = body.sampling(logprobs=body.told_logprobs, max_tokens=body.max_completion_tokens)
        n = body.n or 1
        if serving.retriever is not None and not body.tools:
            messages = [message.plain() for message in body.messages]
            return await serving.retriever.ask(messages, sampling, n)
        return Asked([await serving.prepare(body.prompt())], sampling, n)

    form = ChatForm(
        serving.name,
        n=body.n or 1,
        usage_in_stream=body.wants_usage,
        one_call=body.parallel_tool_calls is False,
    )
    return await serving.respond(request, ask, form, streamed=bool(body.stream))


@dataclass
class ChatForm:
    """The form of chat completions.

    Args:
        model: the model's name for clients.
        n: answers.
        usage_in_stream: whether a stream ends with the usage.
        one_call: whether an answer makes at most one call of a tool.
    """

    model: str
    n: int
    usage_in_stream: bool
    one_call: bool
    prompt_field: str = "messages"
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer."""
        choices = [self._choice(asked, index, answer) for index, answer in enumerate(answers)]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage(answers, self.n),
            "cacheblend": extra_of(asked, answers),
        }

    def _choice(self, asked: Asked, index: int, answer: Generation) -> dict[str, Any]:
        calls = self._calls(answer)
        text = answer.content + asked.closing
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [plain_call(call) for call in calls]
        told = None if answer.logprobs is None else chat_logprobs(answer.logprobs)
        reason = answer.openai_finish_reason
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    async def events(self, asked: Asked, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""
        told = [0] * self.n
        for index in range(self.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for piece in pieces:
            delta, index = piece.delta, piece.index
            answer = delta.generation
            new = delta.logprobs
            if answer is not None and answer.logprobs is not None:
                new = answer.logprobs[told[index] :]
            told[index] += len(new)
            if delta.content or new:
                lines = chat_logprobs(new) if new else None
                yield self._chunk(index, {"content": delta.content}, logprobs=lines)
            if answer is None:
                continue
            if asked.closing:
                yield self._chunk(index, {"content": asked.closing})
            for position, call in enumerate(self._calls(answer)):
                plain = {"index": position, **plain_call(call)}
                yield self._chunk(index, {"tool_calls": [plain]})
            extra = {"cacheblend": extra_of(asked, [answer])}
            yield self._chunk(index, {}, reason=answer.openai_finish_reason, **extra)
        if self.usage_in_stream:
            counted = usage(pieces.in_order(), self.n)
            head = self._head("chat.completion.chunk")
            yield event({**head, "choices": [], "usage": counted})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""
        return event(error.body()) + DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice], **extra}
        return event({**chunk, "usage": None} if self.usage_in_stream else chunk)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _calls(self, answer: Generation) -> Sequence[ToolCall]:
        return answer.tool_calls[:1] if self.one_call else answer.tool_calls


def plain_call(call: ToolCall) -> dict[str, Any]:
    """Return a call of a tool as the API has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
