"""Filling on miss: computes and stores registered chunks that requests missed, in idle time.

A corpus too large to precompute is filled by its traffic. After an answer, the chunks that its
prompt missed wait in a bounded queue; an IdleJob computes those that have waited longest first.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from threading import Lock

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.idle import IdleJob, IdleQueue
from cacheblend_rag.engines.indexing import Indexing
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.report import ChunkReport, FillReport, MissReason, PrecomputeReport
from cacheblend_rag.text.chunk import Chunk

KIND = "fill"
"""Of the idle jobs."""
MOST_WAITING = 256
"""Length of the queue; if it is full, chunks that are missed by then are not filled."""
MOST_AT_ONCE = 16
"""Most chunks of one document that are computed together."""
FILLED: frozenset[MissReason | None] = frozenset({"not stored", "other model"})
"""Miss reasons of chunks that are filled."""
BEING_FILLED: MissReason = "not stored, being filled"


class Filling:
    """An AnswerHook that queues the chunks that prompts missed, and fills them by an IdleQueue.

    engine: computes and stores; may be a weak proxy. is_on: whether newly missed chunks are queued.
    """

    def __init__(self, engine: Indexing, idle: IdleQueue) -> None:
        self.is_on = False
        self._engine, self._idle = engine, idle
        self._lock = Lock()
        self._waiting: dict[KVKey, Chunk] = {}
        self._at_work: dict[KVKey, Chunk] = {}
        self._has_job = False
        self._done, self._seconds, self._dropped = PrecomputeReport(), 0.0, 0

    def see(self, request: Request, answer: Generation) -> Generation | None:
        """Queue the chunks that a prompt missed; returns the answer with updated reports."""
        chunks = answer.report.chunks
        if not self.is_on or self._engine.read_only or all(one.hit for one in chunks):
            return None
        prepared = request.prepared
        there = {
            placed.start: (placed.key, span.chunk)
            for placed, span in zip(prepared.placed, prepared.encoded.spans, strict=True)
        }
        told = tuple(self._seen(one, there.get(one.start)) for one in chunks)
        return replace(answer, report=replace(answer.report, chunks=told))

    def report(self) -> FillReport:
        """Return the counts so far."""
        with self._lock:
            done = self._done
            return FillReport(
                waiting=len(self._waiting) + len(self._at_work),
                computed=done.computed,
                skipped=done.skipped,
                computed_tokens=done.computed_tokens,
                seconds=self._seconds,
                refused=done.refused,
                dropped=self._dropped,
            )

    def _seen(self, told: ChunkReport, missed: tuple[KVKey, Chunk] | None) -> ChunkReport:
        """Queue one chunk if it was missed; returns its updated report."""
        if missed is None or told.reason not in FILLED or not self._want(*missed):
            return told
        return replace(told, reason=BEING_FILLED) if told.reason == "not stored" else told

    def _want(self, key: KVKey, chunk: Chunk) -> bool:
        """Queue a chunk unless it is queued; returns whether it will be filled."""
        if not self._engine._known.has(chunk):
            return False
        with self._lock:
            if key in self._at_work or key in self._waiting:
                return True
            if not self._idle.accepts(KIND):
                return False
            if len(self._waiting) >= MOST_WAITING:
                self._dropped += 1
                return False
            self._waiting[key] = chunk
            return self._queue()

    def _queue(self) -> bool:
        """Queue a job for waiting chunks, or drop them if it is refused; with the lock held."""
        job = IdleJob(
            KIND,
            self._filled,
            when_failed="chunks that requests missed are not filled",
            ended=self._ended,
            waits=not self._engine.fills_last,
        )
        self._has_job = self._has_job or self._idle.add(job)
        if not self._has_job:
            self._dropped += len(self._waiting)
            self._waiting.clear()
        return self._has_job

    # In the idle queue's thread

    def _filled(self) -> Generator[None, None, None]:
        """Fill the chunks that have waited longest."""
        chunks, started = self._take(), time.perf_counter()
        told = 0
        try:
            with closing(self._engine._fill_missed(chunks)) as steps:
                for done in steps:
                    told += done.chunks
                    with self._lock:
                        self._done += done
                    yield
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - started
                self._dropped += max(0, len(chunks) - told)

    def _ended(self) -> None:
        """Queue a job for chunks that wait by now; it is refused after a failure."""
        with self._lock:
            self._at_work, self._has_job = {}, False
            if self._waiting:
                self._queue()

    def _take(self) -> list[Chunk]:
        """Take the chunk that has waited longest, and others of its document."""
        with self._lock:
            first = next(iter(self._waiting))
            others = (key for key in self._waiting if self._is_related(key, first))
            keys = [first, *islice(others, MOST_AT_ONCE - 1)]
            self._at_work = {key: self._waiting.pop(key) for key in keys}
            return sorted(self._at_work.values(), key=lambda chunk: len(chunk.context))

    def _is_related(self, key: KVKey, first: KVKey) -> bool:
        """Whether two different waiting chunks belong to one document."""
        one, other = self._waiting[key], self._waiting[first]
        here, there = (chunk.document_id for chunk in (one, other))
        same = here is not None and here == there and one.collection == other.collection
        return key != first and same
