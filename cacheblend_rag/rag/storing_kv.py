"""Computes and stores the KV of chunks for `index`, and counts it in the report.

While a tier fails, nothing is computed, since it would be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cacheblend_rag.rag.index_report import IndexReport
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import PrecomputeReport
from cacheblend_rag.text.chunk import Chunk

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine

PAUSE_SECONDS = 10.0


class KVStoring:
    """Computes and stores chunks' KV through an engine, and counts it in an IndexReport.

    kv_bytes_per_token: of the engine's model. clock: monotonic seconds. After a call that stored
    nothing because a tier failed, chunks are counted as failed without being computed for
    PAUSE_SECONDS.
    """

    def __init__(
        self,
        engine: Engine,
        report: IndexReport,
        kv_bytes_per_token: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._report = engine, report
        self._kv_bytes_per_token, self._clock = kv_bytes_per_token, clock
        self._cause, self._until = Reason(ReasonCode.STORE_ERROR, ""), 0.0

    def store(self, chunks: Sequence[Chunk], *, verify: bool = False) -> int:
        """Store the KV of chunks; returns how many failed and may be stored later.

        verify: stored chunks are read and checked, and recomputed if damaged.
        """
        if self._clock() < self._until:
            # Known all the same: prompts find them, and what they miss may be filled.
            self._engine.register(chunk for chunk in chunks if chunk.text.strip())
            self._count(PrecomputeReport(refused={self._cause: len(chunks)}))
            return len(chunks)
        done = self._engine.precompute(chunks, progress=False, verify=verify)
        self._count(done)
        known = self._report.failures
        known += [cause for cause in done.failed if cause not in known]
        lasting = [cause for cause in done.failed if cause.code != ReasonCode.NO_ROOM]
        if lasting and not done.computed:
            self._cause, self._until = lasting[0], self._clock() + PAUSE_SECONDS
        return sum(done.failed.values())

    def _count(self, done: PrecomputeReport) -> None:
        report = self._report
        report.computed_chunks += done.computed
        report.computed_tokens += done.computed_tokens
        report.computed_kv_bytes += done.computed_tokens * self._kv_bytes_per_token
        report.compute_seconds += done.seconds
        report.stored_chunks += done.skipped
        for reason, count in done.refused.items():
            report.refused_chunks[reason] = report.refused_chunks.get(reason, 0) + count
            code = reason.code.value
            report.refused_codes[code] = report.refused_codes.get(code, 0) + count
