"""Filling: registered chunks that requests missed, computed and stored once nobody waits.

A corpus too large to precompute warms by its traffic. What a request missed waits in a bounded
queue; a thread, which lives as long as something waits there, has the engine compute it in its idle
time, what was missed most often first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock, Thread

from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.tally import Stored, Tally
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.report import ChunkReport, FillReport, MissReason
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

MOST_WAITING = 256
"""Chunks that wait at most; the least missed one makes room, and is counted as dropped."""
MOST_AT_ONCE = 16
"""Chunks of one document that are computed together at most."""
MOST_REFUSALS = 4096
"""Chunks of which it is remembered that they were refused."""
REST_SECONDS = 60.0
"""After a failure nothing is filled for so long."""
FILLED: frozenset[MissReason | None] = frozenset({"not stored", "other model"})
"""Why chunks were missed that are filled."""
BEING_FILLED: MissReason = "not stored, being filled"

Fill = Callable[[Sequence[Chunk]], Generator[Stored, None, None]]
"""Stores chunks in an engine's idle time.

It yields what became of each, and often in between, so that it can be ended there.
"""


@dataclass
class _Wanted:
    """A chunk that waits, and how many requests missed it."""

    chunk: Chunk
    misses: int = 1


class Filling:
    """See the module. Nothing here is raised into a request.

    registry: only chunks of it are filled. fill: does the work. is_on: whether what is missed from
    now on is filled.
    """

    def __init__(self, registry: ChunkRegistry, fill: Fill) -> None:
        self.is_on = False
        self._registry, self._fill = registry, fill
        self._lock = Lock()
        self._waiting: dict[KVKey, _Wanted] = {}
        self._at_work: dict[KVKey, Chunk] = {}
        self._refusals = _Refusals()
        self._tally, self._seconds, self._dropped = Tally(), 0.0, 0
        self._thread: Thread | None = None
        self._rests_until, self._closed = 0.0, False

    def see(self, prepared: PreparedPrompt, chunks: Sequence[ChunkReport]) -> Sequence[ChunkReport]:
        """Queue what a prompt missed; returns the reports of its chunks, which say so."""
        if not self.is_on or all(chunk.hit for chunk in chunks):
            return chunks
        there = {
            placed.start: (placed.key, span.chunk)
            for placed, span in zip(prepared.placed, prepared.encoded.spans, strict=True)
        }
        return [self._seen(told, there.get(told.start)) for told in chunks]

    def report(self) -> FillReport:
        """Return what was done so far."""
        with self._lock:
            done = self._tally.report(self._seconds, 0)
            return FillReport(
                waiting=len(self._waiting) + len(self._at_work),
                computed=done.computed,
                skipped=done.skipped,
                computed_tokens=done.computed_tokens,
                seconds=done.seconds,
                refused=done.refused,
                dropped=self._dropped,
            )

    def close(self) -> None:
        """End the work, also that which has begun."""
        with self._lock:
            self._closed, thread = True, self._thread
            self._drop(list(self._waiting))
        if thread is not None:
            thread.join()

    def _seen(self, told: ChunkReport, missed: tuple[KVKey, Chunk] | None) -> ChunkReport:
        """Queue one chunk if it was missed; returns its report, which says so."""
        if missed is None or told.reason not in FILLED or not self._want(*missed):
            return told
        return replace(told, reason=BEING_FILLED) if told.reason == "not stored" else told

    def _want(self, key: KVKey, chunk: Chunk) -> bool:
        """Queue a chunk unless it is there already; returns whether it is going to be filled."""
        if chunk not in self._registry.variants(chunk.text):
            return False
        with self._lock:
            if key in self._at_work:
                return True
            if wanted := self._waiting.pop(key, None):
                wanted.misses += 1
                self._waiting[key] = wanted
                return True
            if self._closed or time.monotonic() < self._rests_until or self._refusals.bar(key):
                return False
            if len(self._waiting) >= MOST_WAITING:
                self._drop([min(self._waiting, key=self._misses)])
            self._waiting[key] = _Wanted(chunk)
            return self._start()

    def _start(self) -> bool:
        """Start the thread where there is none; returns whether there is one, at last."""
        if self._thread is not None:
            return True
        thread = Thread(target=self._run, name="cacheblend-fill", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._drop(list(self._waiting))
            logger.warning("chunks that requests missed are not filled: %s", error)
            return False
        self._thread = thread
        return True

    def _misses(self, key: KVKey) -> int:
        return self._waiting[key].misses

    def _drop(self, keys: Iterable[KVKey]) -> None:
        for key in keys:
            del self._waiting[key]
            self._dropped += 1

    # In the thread

    def _run(self) -> None:
        while chunks := self._take():
            started = time.perf_counter()
            self._work(chunks)
            with self._lock:
                self._seconds += time.perf_counter() - started
                self._at_work = {}

    def _take(self) -> list[Chunk]:
        """Take what was missed most, of equals the latest, with what waits of its document."""
        with self._lock:
            if not self._waiting:
                self._thread = None
                return []
            first = max(reversed(self._waiting), key=self._misses)
            others = (key for key in self._waiting if self._is_related(key, first))
            keys = [first, *islice(others, MOST_AT_ONCE - 1)]
            self._at_work = {key: self._waiting.pop(key).chunk for key in keys}
            return sorted(self._at_work.values(), key=lambda chunk: len(chunk.context))

    def _is_related(self, key: KVKey, first: KVKey) -> bool:
        """Whether two chunks that wait, not the same one, are of one document."""
        one, other = self._waiting[key].chunk, self._waiting[first].chunk
        here, there = (chunk.document_id for chunk in (one, other))
        same = here is not None and here == there and one.collection == other.collection
        return key != first and same

    def _work(self, chunks: Sequence[Chunk]) -> None:
        """Have chunks filled; whatever fails ends filling for a while."""
        settled = refused = 0
        try:
            with closing(self._fill(chunks)) as steps:
                for done in steps:
                    settled, refused = settled + done.chunks, refused + len(done.refused)
                    with self._lock:
                        self._tally.add(done)
                    if self._closed:
                        break
        except Exception as error:
            self._rest(error)
        with self._lock:
            self._dropped += max(0, len(chunks) - settled)
            if refused:
                self._refusals.note(self._at_work)

    def _rest(self, error: Exception) -> None:
        with self._lock:
            if self._closed:
                return
            self._drop(list(self._waiting))
            self._rests_until = time.monotonic() + REST_SECONDS
        logger.warning(
            "chunks that requests missed are not filled for %g s: %s",
            REST_SECONDS,
            error,
            exc_info=None if isinstance(error, CacheBlendError) else error,
        )


class _Refusals:
    """Chunks that could not be stored: each is tried again after twice as many misses as before.

    A store that is full, or keeps what is asked for more often, would have them computed in vain.
    """

    def __init__(self) -> None:
        self._barred: dict[KVKey, tuple[int, int]] = {}

    def note(self, keys: Iterable[KVKey]) -> None:
        """Note that chunks were refused."""
        for key in keys:
            after, _ = self._barred.pop(key, (1, 0))
            self._barred[key] = (2 * after, after)
        while len(self._barred) > MOST_REFUSALS:
            del self._barred[next(iter(self._barred))]

    def bar(self, key: KVKey) -> bool:
        """Count a miss; returns whether it is too early to try again."""
        after, left = self._barred.get(key, (0, 0))
        if left:
            self._barred[key] = (after, left - 1)
        return bool(left)
