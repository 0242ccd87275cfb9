"""Sends the prompts of an analysis to an engine, except those whose answers a log holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from threading import Event
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import PromptError, PromptTooLongError
from cacheblend_rag.rag.document_report import AnswerLog, PromptAnswer
from cacheblend_rag.rag.fitting import ANSWER_SHARE

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.settings import BlendConfig
    from cacheblend_rag.text.prompt import BlendPrompt


class PromptAsker:
    """Answers prompts about one document by one engine.

    sampling, config: of all prompts. log: answers that are known already are taken from it, and
    new ones are kept in it. cancel: stops the work. document: its text, on which the KV of chunks
    depends, too. document_hash: 32 hex digits of its SHA-256. answer_tokens: maximum tokens of an
    answer, also where a later prompt contains it.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        *,
        config: BlendConfig | None,
        log: AnswerLog,
        cancel: Event | None,
        document: str,
    ) -> None:
        self.answer_tokens = min(sampling.max_tokens, engine.context_window // ANSWER_SHARE)
        self._sampling = replace(sampling, max_tokens=self.answer_tokens)
        self._engine, self._config = engine, config
        self._log, self._cancel = log, cancel or Event()
        self.document_hash = hashlib.sha256(document.encode("utf-8", "replace")).hexdigest()[:32]

    @property
    def is_cancelled(self) -> bool:
        """Whether cancellation was requested."""
        return self._cancel.is_set()

    def room(self, frame: BlendPrompt) -> int:
        """Return how many tokens a prompt may hold beside ``frame`` and its answer.

        Raises PromptError when there are none.
        """
        try:
            tokens = len(self._engine.prepare(frame).token_ids)
        except PromptTooLongError as error:
            tokens = error.tokens
        room = self._engine.context_window - self.answer_tokens
        if tokens >= room:
            raise PromptError(
                f"the question and the instruction hold {tokens} tokens, more than {room}: shorten "
                "the question"
            )
        return room - tokens

    def within(self, answer: str) -> str:
        """Truncate an answer to ``answer_tokens`` tokens.

        Tokenizing generated text may give more tokens than were generated.
        """
        while (tokens := len(self._engine.tokenize(answer))) > self.answer_tokens:
            answer = answer[: len(answer) * self.answer_tokens // tokens]
        return answer

    def known(self, prompt: BlendPrompt) -> PromptAnswer | None:
        """Return the answer that the log holds, or None."""
        return self._log.get(self._key(prompt))

    def ask(self, prompt: BlendPrompt) -> PromptAnswer | None:
        """Generate an answer and log it; None if cancelled."""
        if self.is_cancelled:
            return None
        generation = self._engine.generate(
            prompt, self._sampling, config=self._config, cancel=self._cancel
        )
        if generation.finish_reason == "cancelled":
            return None
        answer = PromptAnswer.of(generation)
        self._log.put(self._key(prompt), answer)
        return answer

    def _key(self, prompt: BlendPrompt) -> Mapping[str, Any]:
        """Return what an answer depends on."""
        config = self._config or self._engine.config
        return {
            "document": self.document_hash,
            "prompt": hashlib.sha256(prompt.text.encode()).hexdigest()[:32],
            "model": self._engine.model_name,
            "dtype": self._engine.dtype,
            "kv": self._engine.fingerprint,
            "config": config.model_dump(mode="json"),
            "sampling": {**asdict(self._sampling), "stop": list(self._sampling.stop)},
        }
