"""Measures how long reads of chunk KV take, and how long a request waits for them in each layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

from cacheblend_rag.kv.shared_chunk import Found, Part


class BusySeconds:
    """Counts the seconds in which at least one read is in flight; concurrent reads count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._since, self._total = 0, 0.0, 0.0

    def watch(self, future: Future[Part] | Future[Found]) -> None:
        """Count the time from now until ``future`` is done as time in which a read is in flight."""
        self.begin()
        future.add_done_callback(lambda _: self.end())

    def begin(self) -> None:
        """Count the time from now until ``end`` is called as often."""
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        """End a read that ``begin`` began."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._total += time.perf_counter() - self._since

    @property
    def total(self) -> float:
        """Seconds so far."""
        with self._lock:
            running = time.perf_counter() - self._since if self._under_way else 0.0
            return self._total + running


class LayerWait:
    """A wait, from construction until ``seconds``, for the reads of one layer.

    reads: each with its tier; None if it is done. began: a reading of ``time.perf_counter``.
    """

    def __init__(self, reads: Iterable[tuple[str, Future[Part] | None]]) -> None:
        self.began = time.perf_counter()
        self._done: list[tuple[str, list[float]]] = []
        for tier, read in reads:
            at = [self.began] if read is None or read.done() else []
            self._done.append((tier, at))
            if read is not None and not at:
                read.add_done_callback(partial(_note, at))

    def seconds(self, without: float = 0.0) -> dict[str, float]:
        """Return how long each tier was waited for, in seconds; see ``shared``.

        without: seconds since the last read that were spent on other work.
        """
        ended, done = max(self.began, time.perf_counter() - without), dict[str, float]()
        for tier, at in self._done:
            read_at = min(ended, *at) if at else ended
            done[tier] = max(done.get(tier, self.began), read_at)
        return shared(self.began, ended, done)


def shared(began: float, ended: float, done: Mapping[str, float]) -> dict[str, float]:
    """Share a wait among tiers; done: when each tier's last read was done.

    Time in which several tiers were read is shared equally among them. Time after the last read
    (the reader was busy, or another rank still waited) counts for the tier that was done last.
    """
    shares = dict.fromkeys(done, 0.0)
    for start, end in pairwise(sorted({began, *done.values()})):
        waited_for = [tier for tier, at in done.items() if at >= end]
        for tier in waited_for:
            shares[tier] += (end - start) / len(waited_for)
    last = [tier for tier, at in done.items() if at == max(done.values())]
    for tier in last:
        shares[tier] += (ended - done[tier]) / len(last)
    return shares


def _note(at: list[float], _: Future[Part]) -> None:
    at.append(time.perf_counter())
