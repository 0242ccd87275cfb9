"""A conversation with a collection: each prompt holds the earlier turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING

from cacheblend_rag.rag.answering import Asker, finished
from cacheblend_rag.rag.fitting import AskedTurn, FittedPrompt
from cacheblend_rag.rag.ordering import PassageOrder

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta, Generation
    from cacheblend_rag.engines.sampling import SamplingParams


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer."""

    fitted: FittedPrompt
    answer: Generation


class Conversation:
    """The turns so far, and the last prompt and answer (``last``, None at first).

    Each question retrieves ``top_k`` passages of its own. Earlier turns stay in the prompt with
    their passages; when the context window is full, the oldest turns are dropped.
    """

    def __init__(
        self, asker: Asker, sampling: SamplingParams, top_k: int, order: PassageOrder
    ) -> None:
        self.last: Answered | None = None
        self._asker = asker
        self._sampling = sampling
        self._top_k = top_k
        self._order = order
        self._turns: tuple[AskedTurn, ...] = ()

    def ask(self, question: str, cancel: Event | None = None) -> Iterator[Delta]:
        """Stream an answer; the turn is added once the stream was read to its end.

        Turns that did not fit beside it are dropped then; a turn without an answer is not added.
        """
        sources = self._asker.retrieve(question, self._top_k, self._order)
        fitted = self._asker.fit(self._turns, question, sources, self._sampling.max_tokens)
        deltas: list[Delta] = []
        for delta in self._asker.stream(fitted, self._sampling, cancel):
            deltas.append(delta)
            yield delta
        answer = finished(deltas)
        self.last = Answered(fitted, answer)
        *earlier, asked = fitted.turns
        text = answer.text.strip()
        answered = AskedTurn(replace(asked.turn, answer=text), asked.sources)
        self._turns = (*earlier, answered) if text else tuple(earlier)

    def reset(self) -> None:
        """Forget all turns."""
        self._turns, self.last = (), None
