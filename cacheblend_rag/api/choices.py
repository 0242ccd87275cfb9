"""What the answers of chat completions and of completions have alike: a list of choices."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cacheblend_rag.api.answers import Answers, Asked, Piece
from cacheblend_rag.api.serving import DONE, event
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.vllm.refused import ApiError


@dataclass(kw_only=True)
class ChoicesForm(ABC):
    """The form of one answer.

    Args:
        model: the model's name for clients.
        n: choices for each prompt.
        usage_in_stream: whether a stream ends with the usage.
    """

    kind: ClassVar[str]
    """What ``object`` is in an answer."""
    chunk_kind: ClassVar[str]
    """And in a chunk of a stream."""
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str
    n: int
    usage_in_stream: bool
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def choice(self, asked: Asked, index: int, answer: Generation) -> dict[str, Any]:
        """Return an entry of ``choices`` for an answer that is not streamed."""

    @abstractmethod
    def beginning(self, asked: Asked) -> list[bytes]:
        """Return the server-sent events to send before the first piece of an answer."""

    @abstractmethod
    def of_piece(self, asked: Asked, piece: Piece) -> list[bytes]:
        """Return the server-sent events for a piece of an answer."""

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the JSON body of a response that is not streamed."""
        return {
            **self._head(self.kind),
            "choices": [self.choice(asked, index, one) for index, one in enumerate(answers)],
            "usage": self._usage(answers),
            "cacheblend": asked.told(answers),
        }

    async def events(self, asked: Asked, answers: Answers) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""
        first = self.beginning(asked)
        async with aclosing(answers.pieces()) as pieces:
            async for piece in pieces:
                for sent in [*first, *self.of_piece(asked, piece)]:
                    yield sent
                first = []
        if self.usage_in_stream:
            counted = self._usage(answers.finished)
            yield event({**self._head(self.chunk_kind), "choices": [], "usage": counted})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""
        return event(error.body()) + DONE

    def chunk(self, choice: Mapping[str, Any], **extra: Any) -> bytes:
        """Return the event with a choice's next part."""
        told = {**self._head(self.chunk_kind), "choices": [choice], **extra}
        return event({**told, "usage": None} if self.usage_in_stream else told)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the usage of a request; each prompt counts once, though it has ``n`` answers."""
        prompts = answers[:: self.n]
        prompt = sum(answer.prompt_tokens for answer in prompts)
        completion = sum(len(answer.token_ids) for answer in answers)
        cached = sum(answer.report.reused_tokens for answer in prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
