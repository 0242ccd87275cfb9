"""Looks chunks up in one tier after the other, each on its own threads.

A tier that hangs delays only its own lookups: tiers share no thread and no lock. Concurrent lookups
of the same chunk are done once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.shared_chunk import Found
from cacheblend_rag.kv.stored_chunk import miss_of
from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.openmp import use_one_thread
from cacheblend_rag.reason import Miss, Reason

T = TypeVar("T")
FETCH_THREADS = 16
"""Concurrent reads of one tier, for all running prompts."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a prompt reads chunks; prompts with equal options share reads.

    promotes: whether found chunks are kept in faster tiers. unpacks: see SharedChunk.
    """

    promotes: bool
    unpacks: bool


class TierThreads:
    """A pool of reader threads for each tier."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._pools = {
            tier.name: ThreadPoolExecutor(
                FETCH_THREADS, f"kv-fetch-{tier.name}", initializer=use_one_thread
            )
            for tier in tiers
        }

    def submit(self, tier: str, work: Callable[[], T]) -> Future[T]:
        """Run work on a tier's thread; without a thread the future holds a StoreError."""
        try:
            return self._pools[tier].submit(work)
        except RuntimeError as error:  # closed meanwhile, or the system has no thread left
            refused: Future[T] = Future()
            refused.set_exception(StoreError(f"nothing can be read any more: {error}"))
            return refused

    def close(self) -> None:
        """Accept no more work, and wait for running work."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            pool.shutdown(wait=True)


class Search:
    """A lookup of one chunk, shared by all that want it at the same time.

    is_stale: whether the chunk was replaced or evicted since the lookup began, so that its result
    must not be kept; accessed under the openings' lock. has_relative: whether a tier without the
    chunk has it for another model.
    """

    def __init__(self, key: KVKey, way: Way) -> None:
        self.key, self.way, self.is_stale = key, way, False
        self.has_relative = False
        self.missed: tuple[Reason, str | None] = (Miss.NOT_STORED, None)
        self.askers: list[Future[Found]] = []

    @property
    def is_given_up(self) -> bool:
        """Whether all waiters have cancelled."""
        return all(asker.cancelled() for asker in list(self.askers))


class Opening:
    """Looks chunks up, in one tier after the other.

    open_in: opens a chunk in the tier with a given index, None if it is absent; called on that
    tier's threads, which it may block.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        threads: TierThreads,
        open_in: Callable[[int, Search], Found | None],
    ) -> None:
        self._tiers, self._threads, self._open_in = tiers, threads, open_in
        self._lock = threading.Lock()
        self._searches: dict[tuple[KVKey, Way], Search] = {}

    def begin(self, key: KVKey, way: Way) -> Future[Found]:
        """Begin to look a chunk up, or join a running lookup."""
        asker: Future[Found] = Future()
        with self._lock:
            search = self._searches.get((key, way))
            if search is not None:
                search.askers.append(asker)
                return asker
            search = self._searches[key, way] = Search(key, way)
            search.askers.append(asker)
        self._look(search, 0)
        return asker

    def part_with(self, keys: Sequence[KVKey], ways: Sequence[Way]) -> None:
        """Let no new reader join running lookups of a chunk that is replaced or evicted."""
        with self._lock:
            for key in keys:
                for way in ways:
                    search = self._searches.pop((key, way), None)
                    if search is not None:
                        search.is_stale = True

    def is_current(self, search: Search) -> bool:
        """Whether the result of a lookup may be kept."""
        with self._lock:
            return not search.is_stale

    def _look(self, search: Search, depth: int) -> None:
        """Continue a lookup in the tier with index ``depth``, or end it."""
        if depth == len(self._tiers):
            self._end_without(search)
            return
        self._on_threads_of(self._tiers[depth], search, partial(self._look_in, search, depth))

    def _look_in(self, search: Search, depth: int) -> None:
        if search.is_given_up:
            self._end(search, Found(None, Miss.STORE_ERROR))
            return
        found = self._open_in(depth, search)
        if found is None:
            search.has_relative |= self._tiers[depth].has_relative(search.key)
        elif found.reason is None:
            self._end(search, found)
            return
        else:
            search.missed = (found.reason, found.failed)
        self._look(search, depth + 1)

    def _end_without(self, search: Search) -> None:
        """End a search that found nothing, saying why."""
        reason, failed = search.missed
        if reason != Miss.NOT_STORED:
            self._end(search, Found(None, reason, failed))
        elif failing := [tier.name for tier in self._tiers if tier.is_failing]:
            self._end(search, Found(None, Miss.STORE_ERROR, failing[0]))
        else:
            self._end(search, Found(None, Miss.OTHER_MODEL if search.has_relative else reason))

    def _on_threads_of(self, tier: Tier, search: Search, work: Callable[[], None]) -> None:
        """Run a step of a lookup on a tier's thread; a failure ends the lookup."""

        def see(done: Future[None]) -> None:
            error = StoreError("the store was closed") if done.cancelled() else done.exception()
            if error is not None:
                reason = miss_of(error) if isinstance(error, StoreError) else Miss.STORE_ERROR
                self._end(search, Found(None, reason, tier.name))

        self._threads.submit(tier.name, work).add_done_callback(see)

    def _end(self, search: Search, found: Found) -> None:
        with self._lock:
            if self._searches.get((search.key, search.way)) is search:
                del self._searches[search.key, search.way]
            askers, search.askers = search.askers, []
        for asker in askers:
            if asker.set_running_or_notify_cancel():
                asker.set_result(found)
