"""POST /v1/chat/completions: the fields of its requests, and the form of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic import Field

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked, Piece
from cacheblend_rag.api.choices import ChoicesForm
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.api.serving import Serving
from cacheblend_rag.engines.answer import Generation, TokenLogprob
from cacheblend_rag.text.chat import ChatPrompt
from cacheblend_rag.text.tools import ToolCall, ToolChoice


class Message(fields.Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(default=None, max_length=fields.MOST_TOOLS)
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message for the model's chat template."""
        told = self.model_dump(include=set(type(self).model_fields), exclude_none=True)
        return {**told, "role": "system" if self.role == "developer" else self.role}


class ChatRequest(fields.ChoicesBody):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1, max_length=fields.MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=fields.MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None

    def check(self) -> None:
        """Raise ApiError for a field that is not supported, or not together with another one."""
        super().check()
        if self.echo:
            raise bad_field("echo", "is for /v1/completions: leave it out")
        if self.tools == []:
            raise bad_field("tools", "must hold a tool: leave it out")
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: set logprobs to true")

    async def asked(self, serving: Serving) -> Asked:
        """Return the prompts and settings for the engine."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self.sampling(logprobs=logprobs, max_tokens=self.max_completion_tokens)
        messages = [message.plain() for message in self.messages]
        choice = cast(ToolChoice, self.tool_choice or "auto")
        several = self.parallel_tool_calls is not False
        chat = ChatPrompt(messages, self.tools or [], choice, several)
        return await serving.ask_chat(chat, sampling, self.n or 1)

    def form(self, model: str) -> ChatForm:
        """Return what writes the answers as JSON."""
        return ChatForm(model=model, n=self.n or 1, usage_in_stream=self.wants_usage)


class ChatForm(ChoicesForm):
    """The form of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    prompt_field = "messages"

    def choice(self, asked: Asked, index: int, answer: Generation) -> dict[str, Any]:
        """Return an entry of ``choices`` for an answer that is not streamed."""
        calls, text = answer.tool_calls, answer.content + asked.closing
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_plain(call) for call in calls]
        told = None if answer.logprobs is None else _logprobs(answer.logprobs)
        reason = answer.openai_finish_reason
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    def beginning(self, asked: Asked) -> list[bytes]:
        """Return the events before any piece."""
        return [self._part(at, {"role": "assistant", "content": ""}) for at in range(self.n)]

    def of_piece(self, asked: Asked, piece: Piece) -> list[bytes]:
        """Return the events for a piece."""
        index, answer, sent = piece.index, piece.delta.generation, list[bytes]()
        if piece.delta.content or piece.logprobs:
            told = _logprobs(piece.logprobs) if piece.logprobs else None
            sent.append(self._part(index, {"content": piece.delta.content}, logprobs=told))
        if answer is None:
            return sent
        if asked.closing:
            sent.append(self._part(index, {"content": asked.closing}))
        for position, call in enumerate(answer.tool_calls):
            sent.append(self._part(index, {"tool_calls": [{"index": position, **_plain(call)}]}))
        told_of = asked.told([answer])
        return [*sent, self._part(index, {}, answer.openai_finish_reason, cacheblend=told_of)]

    def _part(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.chunk(choice, **extra)


def _plain(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [one.to_openai() for one in tokens], "refusal": None}
