"""Limits how many prompts of a model are prefilled at a time; those that share chunks come next.

Prompts that are prefilled at the same time take turns at the model, a layer at a time, and share
the reads of chunks. Without a limit, all of many threads would hold their prompts' KV at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from cacheblend_rag.engines.batch_order import (
    GROUPS_AHEAD,
    MOST_TOGETHER,
    MOST_WAIT,
    Chunks,
    Overlap,
)
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers.model_steps import PATIENCE_SECONDS

_queues: WeakKeyDictionary[PreTrainedModel, PrefillQueue] = WeakKeyDictionary()
_queues_lock = threading.Lock()


def queue_of(model: PreTrainedModel) -> PrefillQueue:
    """Return the prefill queue that all engines around a model share."""
    with _queues_lock:
        return _queues.setdefault(model, PrefillQueue())


@dataclass(eq=False)
class Turn:
    """A prompt in the queue.

    overtaken: how many later ones have begun before it. counts: whether it is one of those that are
    prefilled at a time.
    """

    queue: PrefillQueue
    chunks: Chunks
    overtaken: int = 0
    counts: bool = False
    has_begun: threading.Event = field(default_factory=threading.Event)

    def stall(self) -> None:
        """Let another prompt begin, since this one waits long for its store."""
        self.queue.end(self)


class PrefillQueue:
    """Lets at most ``most`` prompts with chunks be prefilled at a time.

    When one is done, the waiting prompt begins that shares most chunk KV with those that began last
    (``Overlap``), the oldest of several. No prompt is overtaken by more than ``most_wait`` times
    ``most`` later ones. Prompts without chunks need no turn: they do not wait for a store.
    """

    def __init__(self, most: int = MOST_TOGETHER, most_wait: int = MOST_WAIT) -> None:
        self._most, self._most_overtaken = most, most * most_wait
        self._lock = threading.Lock()
        self._waiting: list[Turn] = []
        self._running = self._begun = 0
        self._overlap = Overlap()

    @contextmanager
    def turn(self, chunks: Chunks, cancel: Cancellation) -> Iterator[Turn | None]:
        """Wait for a prompt's turn, which lasts until the context ends.

        Yields None if the request was cancelled meanwhile.
        """
        turn = Turn(self, chunks)
        try:
            self.enter(turn)
            while not turn.has_begun.wait(PATIENCE_SECONDS) and not cancel.is_set():
                pass
            yield turn if turn.has_begun.is_set() else None
        finally:
            self.leave(turn)

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for their prefill to begin."""
        return len(self._waiting)

    def enter(self, turn: Turn) -> None:
        """Add a prompt; its turn begins now or later."""
        with self._lock:
            if not turn.chunks:
                turn.has_begun.set()
                return
            self._waiting.append(turn)
            self._overlap.wait(turn.chunks)
            self._begin_next()

    def leave(self, turn: Turn) -> None:
        """Remove a prompt: it was prefilled, or waits no longer."""
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._overlap.leave(turn.chunks)
        self.end(turn)

    def end(self, turn: Turn) -> None:
        """Free a prompt's place among those prefilled at a time; the next one begins."""
        with self._lock:
            if turn.counts:
                turn.counts = False
                self._running -= 1
            self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting and self._running < self._most:
            self._begin(self._next())

    def _next(self) -> Turn:
        # The oldest one has been overtaken at least as often as any other.
        if (oldest := self._waiting[0]).overtaken >= self._most_overtaken:
            return oldest
        oldest_ones = islice(self._waiting, self._most * GROUPS_AHEAD)
        return max(oldest_ones, key=lambda one: self._overlap.of(one.chunks))

    def _begin(self, turn: Turn) -> None:
        place = self._waiting.index(turn)
        for older in self._waiting[:place]:
            older.overtaken += 1
        del self._waiting[place]
        if self._begun % self._most == 0:
            self._overlap.begin_group()
        self._begun += 1
        self._overlap.begin(turn.chunks)
        self._running, turn.counts = self._running + 1, True
        turn.has_begun.set()
