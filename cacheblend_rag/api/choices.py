"""What the answers of chat completions and of completions have alike: a list of choices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cacheblend_rag.api.answers import Asked, Form, event
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.vllm.refused import ApiError

DONE = b"data: [DONE]\n\n"


class ChoicesForm(Form):
    """The form of answers with ``choices``; usage_in_stream: whether a stream ends with the usage.

    Attributes:
        kind: what ``object`` is in an answer.
        chunk_kind: and in a chunk of a stream.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, asked: Asked, model: str, *, usage_in_stream: bool) -> None:
        super().__init__(asked, model)
        self._usage_in_stream = usage_in_stream

    @abstractmethod
    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        """Return an entry of ``choices`` for an answer that is not streamed."""

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        return {
            **self._head(self.kind),
            "choices": [self.choice(index, answer) for index, answer in enumerate(answers)],
            "usage": self._usage(answers),
            "cacheblend": self.asked.told(answers[0]),
        }

    def chunk(
        self, choice: Mapping[str, Any], answer: Generation | None = None, **others: Any
    ) -> bytes:
        """Return the event with a choice's next part.

        answer: the whole one, with the last part. others: fields beside the choice.
        """
        told = {**self._head(self.chunk_kind), "choices": [choice], **others}
        if answer is not None:
            told["cacheblend"] = self.asked.told(answer)
        return event({**told, "usage": None} if self._usage_in_stream else told)

    def ending(self, answers: Sequence[Generation]) -> list[bytes]:
        if not self._usage_in_stream:
            return [DONE]
        told = {**self._head(self.chunk_kind), "choices": [], "usage": self._usage(answers)}
        return [event(told), DONE]

    def failure(self, error: ApiError) -> list[bytes]:
        return [event(error.body()), DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the usage of a request; each prompt counts once, though it has ``n`` answers."""
        prompts = answers[:: self.asked.n]
        prompt = sum(answer.prompt_tokens for answer in prompts)
        completion = sum(len(answer.token_ids) for answer in answers)
        cached = sum(answer.report.reused_tokens for answer in prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
