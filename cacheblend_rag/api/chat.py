"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked, ChoicesForm, Piece, chat_logprobs, extra_of
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.api.serving import Serving
from cacheblend_rag.engines.answer import Generation
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


class ChatRequest(fields.Request):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1, max_length=fields.MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=fields.MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None

    def prompt(self) -> ChatPrompt:
        """Return the prompt; raises PromptError for a malformed tool or choice."""
        messages = [message.plain() for message in self.messages]
        tools = self.tools or []
        choice = cast(ToolChoice, self.tool_choice or "auto")
        return ChatPrompt(messages, tools, choice, self.parallel_tool_calls is not False)

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
        if body.tools == []:
            raise bad_field("tools", "must hold a tool: leave it out")
        sampling = body.sampling(logprobs=body.told_logprobs, max_tokens=body.max_completion_tokens)
        n = body.n or 1
        if serving.retriever is not None and not body.tools:
            messages = [message.plain() for message in body.messages]
            return await serving.retriever.ask(messages, sampling, n, serving.gate)
        return Asked([await serving.prepare(body.prompt())], sampling, n)

    form = ChatForm(model=serving.name, n=body.n or 1, usage_in_stream=body.wants_usage)
    return await serving.respond(
        request, ask, form, streamed=bool(body.stream), cache_salt=body.cache_salt
    )


class ChatForm(ChoicesForm):
    """The form of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    prompt_field = "messages"

    def choice(self, asked: Asked, index: int, answer: Generation) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        calls = answer.tool_calls
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

    def beginning(self, asked: Asked) -> list[bytes]:
        """Return the events before any piece."""
        role = {"role": "assistant", "content": ""}
        return [self._part(index, role) for index in range(self.n)]

    def of_piece(self, asked: Asked, piece: Piece) -> list[bytes]:
        """Return the events for a piece."""
        index, answer, sent = piece.index, piece.delta.generation, list[bytes]()
        if piece.delta.content or piece.logprobs:
            told = chat_logprobs(piece.logprobs) if piece.logprobs else None
            sent.append(self._part(index, {"content": piece.delta.content}, logprobs=told))
        if answer is None:
            return sent
        if asked.closing:
            sent.append(self._part(index, {"content": asked.closing}))
        for position, call in enumerate(answer.tool_calls):
            plain = {"index": position, **plain_call(call)}
            sent.append(self._part(index, {"tool_calls": [plain]}))
        extra = {"cacheblend": extra_of(asked, [answer])}
        return [*sent, self._part(index, {}, reason=answer.openai_finish_reason, **extra)]

    def _part(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.chunk(choice, **extra)


def plain_call(call: ToolCall) -> dict[str, Any]:
    """Return a call of a tool as the API has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
