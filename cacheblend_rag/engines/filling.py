"""Filling on miss: computes and stores registered chunks that requests missed, in idle time.

A corpus too large to precompute is filled by its traffic: the chunks that a prompt missed become an
IdleJob after its answer; those that have waited longest come first.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.idle import IdleJob, IdleQueue
from cacheblend_rag.engines.indexing import Indexing
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.reason import Miss, ReasonCode
from cacheblend_rag.report import FillReport, PrecomputeReport
from cacheblend_rag.text.chunk import Chunk

FILLED = frozenset({ReasonCode.NOT_STORED, ReasonCode.OTHER_MODEL})
"""Miss reasons of chunks that are filled."""


@dataclass(eq=False)
class _Missed:
    """What a prompt missed; untold: how many of the chunks no result is known of."""

    chunks: Mapping[KVKey, Chunk]
    untold: int


class Filling:
    """An AnswerHook that has the chunks that prompts missed filled by an IdleQueue.

    engine: computes and stores; may be a weak proxy. is_on: whether newly missed chunks are queued.
    """

    def __init__(self, engine: Indexing, idle: IdleQueue) -> None:
        self.is_on = False
        self._engine, self._idle = engine, idle
        self._lock = Lock()
        self._waiting: set[KVKey] = set()
        self._done, self._dropped = PrecomputeReport(), 0

    def see(self, request: Request, answer: Generation) -> Generation | None:
        """Queue the chunks that a prompt missed; returns the answer with updated reports."""
        if not self.is_on or self._engine.read_only:
            return None
        prepared, chunks = request.prepared, answer.report.chunks
        starts = {chunk.start for chunk in chunks if chunk.reason_code in FILLED}
        missed = {
            placed.start: (placed.key, span.chunk)
            for placed, span in zip(prepared.placed, prepared.encoded.spans, strict=True)
            if placed.start in starts and self._engine._known.has(span.chunk)
        }
        filled = self._queue(dict(missed.values()))
        told = {start for start, (key, _) in missed.items() if key in filled}
        chunks = tuple(
            replace(chunk, reason=Miss.BEING_FILLED)
            if chunk.reason_code == ReasonCode.NOT_STORED and chunk.start in told
            else chunk
            for chunk in chunks
        )
        return replace(answer, report=replace(answer.report, chunks=chunks))

    def report(self) -> FillReport:
        """Return the counts so far."""
        with self._lock:
            counted = vars(self._done)
            return FillReport(**counted, waiting=len(self._waiting), dropped=self._dropped)

    def _queue(self, missed: Mapping[KVKey, Chunk]) -> Set[KVKey]:
        """Queue chunks that do not wait already; returns the keys of those that will be filled."""
        with self._lock:
            chunks = {key: one for key, one in missed.items() if key not in self._waiting}
            new = _Missed(chunks, len(chunks))
            job = IdleJob(
                "fill",
                partial(self._filled, new),
                ended=partial(self._ended, new),
                waits=not self._engine.fills_last,
            )
            if chunks and self._idle.add(job):
                self._waiting |= chunks.keys()
            else:
                self._dropped += len(chunks)
            return self._waiting & missed.keys()

    # In the idle queue's thread

    def _filled(self, missed: _Missed) -> Generator[None, None, None]:
        """Fill chunks, each document's one after the other."""
        started = time.perf_counter()
        chunks = sorted(
            missed.chunks.values(),
            key=lambda one: (one.document_id or "", one.collection, len(one.context)),
        )
        try:
            with closing(self._engine._fill_missed(chunks)) as steps:
                for done in steps:
                    missed.untold -= done.chunks
                    with self._lock:
                        self._done += done
                    yield
        finally:
            with self._lock:
                self._done += PrecomputeReport(seconds=time.perf_counter() - started)

    def _ended(self, missed: _Missed) -> None:
        with self._lock:
            self._waiting -= missed.chunks.keys()
            self._dropped += max(0, missed.untold)
