"""The form of responses: their output items, and the events of their streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.api.answers import Answers, Asked
from cacheblend_rag.api.serving import event
from cacheblend_rag.engines.answer import Generation, TokenLogprob
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.text.tools import ToolCall


@dataclass
class ResponseForm:
    """The form of one response.

    Args:
        model: the model's name for clients.
        told: fields of the request that the response repeats.
    """

    model: str
    told: Mapping[str, Any]
    prompt_field: str = "input"
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _sent: int = 0

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer."""
        (answer,) = answers
        text = answer.content + asked.closing
        output = [self._message(text, answer)] if text or not answer.tool_calls else []
        return self._ended(asked, answer, [*output, *map(_call_item, answer.tool_calls)])

    async def events(self, asked: Asked, answers: Answers) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""
        begun = self._response("in_progress", [])
        sent = [
            self._event(f"response.{one}", response=begun) for one in ("created", "in_progress")
        ]
        text: str | None = None  # until the message is opened, which an answer of calls has not
        async with aclosing(answers.pieces()) as pieces:
            async for piece in pieces:
                answer = piece.delta.generation
                more = piece.delta.content + (asked.closing if answer else "")
                if text is None and (more or (answer and not answer.tool_calls)):
                    text = ""
                    sent += self._opening()
                if text is not None and (more or piece.logprobs):
                    text += more
                    sent.append(self._text("delta", delta=more, logprobs=_told(piece.logprobs)))
                for one in sent:
                    yield one
                sent = []
        (answer,) = answers.finished
        output = [] if text is None else [self._message(text, answer)]
        for message in output:
            for one in self._closing(message):
                yield one
        for call in map(_call_item, answer.tool_calls):
            for one in self._called(call, len(output)):
                yield one
            output.append(call)
        ended = self._ended(asked, answer, output)
        yield self._event(f"response.{ended['status']}", response=ended)

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""
        told = error.body()["error"]
        return self._event("error", message=told["message"], code=told["code"], param=told["param"])

    def _event(self, kind: str, **told: Any) -> bytes:
        sent = event({"type": kind, "sequence_number": self._sent, **told}, kind)
        self._sent += 1
        return sent

    def _text(self, what: str, **told: Any) -> bytes:
        return self._event(f"response.output_text.{what}", **self._place, **told)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.message_id, "output_index": 0, "content_index": 0}

    def _opening(self) -> Iterator[bytes]:
        item = self._message("", None)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=part)

    def _closing(self, message: Mapping[str, Any]) -> Iterator[bytes]:
        (part,) = message["content"]
        yield self._text("done", text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)

    def _called(self, item: Mapping[str, Any], index: int) -> Iterator[bytes]:
        where, told = {"item_id": item["id"], "output_index": index}, item["arguments"]
        begun, kind = {**item, "arguments": "", "status": "in_progress"}, "function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"response.{kind}.delta", **where, delta=told)
        yield self._event(f"response.{kind}.done", **where, arguments=told, name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _message(self, text: str, answer: Generation | None) -> dict[str, Any]:
        """Return the message with the text; answer: None while it is in progress."""
        told = _told((answer and answer.logprobs) or ())
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": told}
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if answer is None else _status(answer),
            "content": [] if answer is None else [part],
        }

    def _ended(
        self, asked: Asked, answer: Generation, output: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the whole response."""
        tokens = len(answer.token_ids)
        cached = {"cached_tokens": answer.report.reused_tokens, "cache_write_tokens": 0}
        why = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
        return {
            **self._response(_status(answer), output),
            "incomplete_details": why,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": cached,
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + tokens,
            },
            "cacheblend": asked.told([answer]),
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
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self.told,
        }


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _told(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [one.to_openai() for one in tokens]


def _status(answer: Generation) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
