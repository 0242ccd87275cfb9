"""The report of an `index` run, the storing of KV that it counts, and checks of its paths."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import PrecomputeReport
from cacheblend_rag.settings.base import size
from cacheblend_rag.text.chunk import Chunk

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.rag.readers import FoundFiles

PAUSE_SECONDS = 10.0


@dataclass
class IndexReport:
    """The results of one run.

    added, changed, unchanged: files. removed: documents deleted because their files are gone;
    vanished: such documents that were kept. unknown: files with an unsupported extension. skipped:
    files that could not be indexed, and why. notes: files that were indexed without all of their
    pages, or in an encoding that was guessed. computed_chunks, stored_chunks: chunks of files that
    were read whose KV was computed, or was stored already. computed_tokens, compute_seconds,
    computed_kv_bytes: of the computed ones. refused_chunks, refused_codes: chunks without KV, by
    reason and by its code. registered_chunks: chunks that were only registered.
    evicted_chunks: of no document, whose KV a repair dropped. documents, chunks: totals of the
    collection at the end. failures: why KV could not be stored in this run; the next
    run tries again.
    unfinished_documents, unfinished_chunks: those whose KV could not be stored, in this run or
    before; the next run computes it.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    vanished: int = 0
    unknown: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    notes: list[dict[str, str]] = field(default_factory=list)
    computed_chunks: int = 0
    computed_tokens: int = 0
    computed_kv_bytes: int = 0
    compute_seconds: float = 0.0
    stored_chunks: int = 0
    refused_chunks: dict[str, int] = field(default_factory=dict)
    refused_codes: dict[str, int] = field(default_factory=dict)
    registered_chunks: int = 0
    evicted_chunks: int = 0
    documents: int = 0
    chunks: int = 0
    failures: list[str] = field(default_factory=list)
    unfinished_documents: int = 0
    unfinished_chunks: int = 0

    @property
    def pace(self) -> str:
        """The speed at which KV was computed, and its size."""
        rate = self.computed_tokens / self.compute_seconds if self.compute_seconds else 0.0
        return f"{rate:,.0f} tokens per second, {size(self.computed_kv_bytes)} of KV"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def check(self, paths: Iterable[Path]) -> None:
        """Raise StoreError when nothing at ``paths`` was indexed, in this run or before."""
        if not (self.added + self.changed + self.unchanged + self.removed + self.vanished):
            raise _nothing(paths, self.unknown, len(self.skipped))


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


def check_paths(paths: Iterable[Path], found: FoundFiles, known: Sequence[Path]) -> None:
    """Raise StoreError when a path does not exist, or there is nothing to do.

    known: the files of the collection's documents; they may be pruned below a missing path.
    """
    paths = list(paths)
    for path in paths:
        below = (file for file in known if file.is_relative_to(path.resolve()))
        if not os.path.lexists(path) and not any(below):
            raise StoreError(f"{path} does not exist")
    if not found.files and not known:
        raise _nothing(paths, found.unknown, 0)


def _nothing(paths: Iterable[Path], unknown: int, skipped: int) -> StoreError:
    return StoreError(
        f"nothing could be indexed in {', '.join(map(str, paths))}: {skipped} files skipped, "
        f"{unknown} with an extension that is not text, Markdown, HTML or PDF"
    )
