"""POST /v1/chat/completions: the fields of its requests, and the form of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked
from cacheblend_rag.api.choices import ChoicesForm
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.engines.answer import Delta, Generation, TokenLogprob
from cacheblend_rag.text.chat import ChatPrompt
from cacheblend_rag.text.tools import ToolChoice

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever
    from cacheblend_rag.engines.base import Engine


class Message(fields.Fields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(default=None, max_length=fields.MOST_TOOLS)
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message for the model's chat template; it calls functions tools."""
        told = self.model_dump(include=set(type(self).model_fields), exclude_none=True)
        if called := told.pop("function_call", None):
            told["tool_calls"] = [{"type": "function", "function": called}]
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        return {**told, "role": role}


class ChatRequest(fields.ChoicesBody):
    """The body of a chat completion."""

    prompt_field: ClassVar[str] = "messages"
    messages: list[Message] = Field(min_length=1, max_length=fields.MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=fields.MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    def asked(self, engine: Engine, retriever: Retriever | None) -> Asked:
        self.check()
        if self.tools == []:
            raise bad_field("tools", "must hold a tool: leave it out")
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: set logprobs to true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        messages = [message.plain() for message in self.messages]
        choice = cast(ToolChoice, self.tool_choice or "auto")
        several = self.parallel_tool_calls is not False
        chat = ChatPrompt(messages, self.tools or [], choice, several)
        told = {"logprobs": logprobs, "max_tokens": self.max_completion_tokens}
        return self.asked_chat(engine, retriever, chat, self.n or 1, **told)

    def form(self, asked: Asked, model: str) -> ChatForm:
        return ChatForm(asked, model, usage_in_stream=self.wants_usage)


class ChatForm(ChoicesForm):
    """The form of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        calls, text = answer.tool_calls, answer.content + self.asked.closing
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [call.to_openai() for call in calls]
        told = None if answer.logprobs is None else _logprobs(answer.logprobs)
        reason = answer.openai_finish_reason
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    def beginning(self) -> list[bytes]:
        return [self._part(at, {"role": "assistant", "content": ""}) for at in range(self.asked.n)]

    def of_piece(self, index: int, delta: Delta) -> list[bytes]:
        answer, sent = delta.generation, list[bytes]()
        if delta.content or delta.logprobs:
            sent.append(self._part(index, {"content": delta.content}, delta.logprobs))
        if answer is None:
            return sent
        if self.asked.closing:
            sent.append(self._part(index, {"content": self.asked.closing}))
        for position, call in enumerate(answer.tool_calls):
            sent.append(
                self._part(index, {"tool_calls": [{"index": position, **call.to_openai()}]})
            )
        return [*sent, self._part(index, {}, answer=answer)]

    def _part(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        answer: Generation | None = None,
    ) -> bytes:
        told = _logprobs(logprobs) if logprobs else None
        reason = answer.openai_finish_reason if answer else None
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": reason}
        return self.chunk(choice, answer)


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [one.to_openai() for one in tokens], "refusal": None}
