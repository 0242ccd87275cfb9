"""The form of responses: their output items, and the events of their streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.api.answers import Asked, Pieces, extra_of, response_logprobs
from cacheblend_rag.api.errors import ApiError
from cacheblend_rag.api.wire import event
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.text.tools import ToolCall


@dataclass
class ResponseForm:
    """The form of one response.

    Args:
        model: the model's name for clients.
        told: fields of the request that the response repeats.
        tools, tool_choice, format: as in the request.
        one_call: whether an answer calls one tool at most.
    """

    model: str
    told: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: Any
    format: Mapping[str, Any]
    one_call: bool
    prompt_field: str = "input"
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _sent: int = 0

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer."""
        answer = answers[0]
        calls = answer.tool_calls
        text = answer.content + asked.closing
        output = [self._message(text, answer)] if text or not calls else []
        output += [_call_item(call, "completed") for call in calls]
        return self._ended(asked, answer, output)

    async def events(self, asked: Asked, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        text, opened = "", False
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        async for piece in pieces:
            delta, answer = piece.delta, piece.delta.generation
            new = piece.logprobs
            more = delta.content + (asked.closing if answer else "")
            if answer and not (text + more) and not answer.tool_calls and not opened:
                opened = True
                for sent in self._opening(place):
                    yield sent
            if more or (new and opened):
                if not opened:
                    opened = True
                    for sent in self._opening(place):
                        yield sent
                text += more
                lines = response_logprobs(new)
                kind = "response.output_text.delta"
                yield self._event(kind, **place, delta=more, logprobs=lines)
        answer = pieces.in_order()[0]
        output = []
        if opened:
            message = self._message(text, answer)
            for sent in self._closing(place, text, message):
                yield sent
            output.append(message)
        for call in answer.tool_calls:
            index = len(output)
            item = _call_item(call, "completed")
            where = {"item_id": item["id"], "output_index": index}
            begun_item = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=begun_item)
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **where, delta=call.arguments)
            yield self._event(f"{kind}.done", **where, arguments=call.arguments, name=call.name)
            yield self._event("response.output_item.done", output_index=index, item=item)
            output.append(item)
        ended = self._ended(asked, answer, output)
        yield self._event(f"response.{ended['status']}", response=ended)

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""
        told = error.body()["error"]
        return self._event("error", message=told["message"], code=told["code"], param=told["param"])

    def _opening(self, place: Mapping[str, Any]) -> list[bytes]:
        item = self._message("", None)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **place, part=part),
        ]

    def _closing(
        self, place: Mapping[str, Any], text: str, message: Mapping[str, Any]
    ) -> list[bytes]:
        (part,) = message["content"]
        lines = part["logprobs"]
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=lines),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=message),
        ]

    def _event(self, kind: str, **told: Any) -> bytes:
        sent = event({"type": kind, "sequence_number": self._sent, **told}, kind)
        self._sent += 1
        return sent

    def _message(self, text: str, answer: Generation | None) -> dict[str, Any]:
        """Return the message with the text; answer: None while it is in progress."""
        part = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": response_logprobs((answer and answer.logprobs) or ()),
        }
        status = "in_progress" if answer is None else _status(answer)
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if answer is None else [part],
        }

    def _ended(
        self, asked: Asked, answer: Generation, output: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the whole response."""
        tokens = len(answer.token_ids)
        why = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
        return {
            **self._response(_status(answer), output),
            "incomplete_details": why,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": answer.report.reused_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + tokens,
            },
            "cacheblend": extra_of(asked, [answer]),
        }

    def _response(self, status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": not self.one_call,
            "tool_choice": self.tool_choice,
            "tools": self.tools,
            "text": {"format": self.format},
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self.told,
        }


def _call_item(call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _status(answer: Generation) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
