"""Registers chunks, and computes, stores, verifies and evicts their KV."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from weakref import ref

from tqdm import tqdm

from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.known_chunks import EMPTY, Item, KnownChunks, whole_documents
from cacheblend_rag.engines.lifetime import Lifetime, working
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import READ_ONLY
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import Evicted, PrecomputeReport
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

FORGOTTEN = Reason(ReasonCode.FORGOTTEN, "forgotten meanwhile")
"""The reason for chunks whose KV was dropped again, since another writer has removed them."""
TOO_LONG = Reason(ReasonCode.TOO_LONG, "longer than the context window")


class IndexTime:
    """Keeps the KV of registered chunks stored, through one backend and with one lead-in.

    backend: computes and stores; may be a weak proxy. lifetime: of the engine. Methods raise the
    same errors as Engine's methods of the same names.
    """

    def __init__(
        self, backend: Backend, lifetime: Lifetime, registry: ChunkRegistry, lead_in: LeadIn
    ) -> None:
        self._backend, self._lifetime, self._lead_in = backend, lifetime, lead_in
        self._known = KnownChunks(registry, lead_in, backend)
        # A shared registry may outlive the engine: it must not keep the engine's objects alive.
        me = ref(self)

        def forget(chunks: Sequence[Chunk]) -> None:
            if (index_time := me()) is not None:
                with suppress(ReferenceError):  # the engine was dropped, its idle work was not yet
                    index_time.forget_removed(chunks)

        registry.watch(forget)

    @property
    def is_writable(self) -> bool:
        """Whether the store is written to."""
        return not self._backend.read_only

    @property
    def fills_last(self) -> bool:
        """Whether the backend itself puts filling behind all other work."""
        return self._backend.fills_last

    def has(self, chunk: Chunk) -> bool:
        """Whether this very chunk is registered."""
        return self._known.has(chunk)

    def register(self, items: Iterable[Item]) -> None:
        """Register chunks without computing anything."""
        self._lifetime.check()
        self._known.register(items)

    def precompute(
        self, items: Iterable[Item], progress: bool, register_only: bool, verify: bool
    ) -> PrecomputeReport:
        """Register chunks and store their KV; chunks that are stored already are skipped."""
        self._begin_writing()
        started, refused = time.perf_counter(), Counter[Reason]()
        chunks, replaced = self._known.replace(items, refused)
        total = PrecomputeReport(refused=dict(refused), replaced=replaced)
        if register_only:
            seconds = time.perf_counter() - started
            return replace(total, registered=len(chunks), seconds=seconds)
        refusal = self._backend._storing_refusal() if chunks else None
        with tqdm(total=len(chunks), desc="precompute", unit="chunk", disable=not progress) as bar:
            for part in whole_documents(chunks, self._backend.part_chunks):
                with closing(self._stored(part, refusal, verify)) as steps:  # also if interrupted
                    for done in steps:
                        total += done
                        bar.update(done.chunks)
                        self._lifetime.check()
                forgotten = {FORGOTTEN: self._known.drop_forgotten(part)}
                total += PrecomputeReport(refused=forgotten)
        return replace(total, seconds=time.perf_counter() - started)

    def fill(self, chunks: Sequence[Chunk]) -> Generator[PrecomputeReport]:
        """Store chunks in idle time, except those that are forgotten before or meanwhile."""
        with working():
            self._backend._refresh()
            known = [chunk for chunk in chunks if self._known.has(chunk)]
            refusal = self._backend._storing_refusal() if known else None
            plans, done = self._admitted(known, refusal)
        yield done
        if plans:
            yield from self._stored_with_bare(known, plans, self._backend._fill)
        lost = len(chunks) - len(known) + self._known.drop_forgotten(known)
        yield PrecomputeReport(refused={FORGOTTEN: lost} if lost else {})

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks into the fastest tier; returns at once."""
        self._lifetime.check()
        self._backend._refresh()
        if keys := self._known.hinted(hints):
            self._backend._prefetch(keys)

    def evict_document(
        self, document_id: str, collection: str | None, kept: Sequence[Chunk]
    ) -> Evicted:
        """Forget a document's chunks except ``kept``; returns for how many KV was dropped.

        collection: only the chunks of this collection; None is all.
        """
        self._begin_writing()
        return self._known.forget(document_id, collection, frozenset(kept))

    def evict_unregistered(self) -> Evicted:
        """Drop this fingerprint's KV that belongs to no registered chunk; returns how many."""
        self._begin_writing()
        return self._backend._evict(self._known.unregistered(self._backend._stored_keys()))

    def forget_removed(self, chunks: Sequence[Chunk]) -> None:
        """Drop the KV of chunks that another writer has forgotten."""
        if self._lifetime.is_open:
            self._backend._forget(self._known.removed_by_others(chunks))

    def fits(self, plan: ChunkPlan, behind: tuple[int, ...]) -> bool:
        """Whether a chunk can be computed after its lead-in and some more tokens."""
        tokens = len(plan.lead) + len(behind) + len(plan.token_ids)
        return tokens <= self._backend._longest_run

    def _begin_writing(self) -> None:
        self._lifetime.check()
        if not self.is_writable:
            raise StoreError(READ_ONLY)
        self._backend._refresh()

    def _stored(
        self, chunks: Sequence[Chunk], refusal: Reason | None, verify: bool
    ) -> Generator[PrecomputeReport]:
        """Store chunks; yields results, a few at a time."""
        plans, done = self._admitted(chunks, refusal)
        yield done
        if not plans:
            return
        if verify:
            plans, lost = self._verified(plans)
            for reason in lost:
                yield PrecomputeReport(refused={reason: 1}, failed={reason: 1})
        if plans:
            store = self._backend._store
            yield from self._stored_with_bare(chunks, plans, store, verify=verify)

    def _stored_with_bare(
        self,
        chunks: Sequence[Chunk],
        plans: Sequence[ChunkPlan],
        store: Callable[[Sequence[ChunkPlan]], Generator[PrecomputeReport]],
        *,
        verify: bool = False,
    ) -> Generator[PrecomputeReport]:
        """Store planned chunks, then the bare chunks they need.

        Yields the results; those others count nothing. None are stored after a chunk could not be:
        they would take the room or the time that it needs when it is tried again.
        """
        is_complete = True
        with closing(store(plans)) as steps:
            for done in steps:
                is_complete = is_complete and not done.refused
                yield done
        if not is_complete:
            return
        with working():
            others, refused = self._plans_of_others(chunks, plans)
        if others and verify:
            others, _ = self._verified(others)
        _log_refused(refused)
        if others:
            with closing(store(others)) as steps:
                for done in steps:
                    _log_refused(done.refused)
                    yield PrecomputeReport()

    def _plans_of_others(
        self, chunks: Sequence[Chunk], plans: Sequence[ChunkPlan]
    ) -> tuple[list[ChunkPlan], Mapping[Reason, int]]:
        """Return plans of the bare chunks of chunks, and why others are refused."""
        planned = {plan.key for plan in plans}
        chosen = [chunk for chunk in chunks if self._lead_in.key(chunk) in planned]
        admitted, done = self._admitted(self._known.bare(chosen), None)
        return admitted, done.refused

    def _verified(self, plans: Sequence[ChunkPlan]) -> tuple[list[ChunkPlan], list[Reason]]:
        """Check stored KV; returns the plans but for those whose KV is unreadable, and why."""
        lost = self._backend._verify([plan.key for plan in plans])
        return [plan for plan in plans if plan.key not in lost], list(lost.values())

    def _admitted(
        self, chunks: Iterable[Chunk], refusal: Reason | None
    ) -> tuple[list[ChunkPlan], PrecomputeReport]:
        """Return the distinct chunks that can be stored, and the results of the others."""
        plans: dict[KVKey, ChunkPlan] = {}
        refused: Counter[Reason] = Counter()
        admitted = 0
        for chunk in chunks:
            plan = self._lead_in.resolve(chunk)
            if reason := self._unfit(plan) or refusal:
                refused[reason] += 1
            else:
                plans[plan.key] = plan
                admitted += 1
        return list(plans.values()), PrecomputeReport(
            skipped=admitted - len(plans), refused=refused
        )

    def _unfit(self, plan: ChunkPlan) -> Reason | None:
        """Return why a chunk cannot be computed, or None."""
        if not plan.token_ids:
            return EMPTY
        behind = plan.context if self._lead_in.name == "document" else ()
        return None if self.fits(plan, behind) else TOO_LONG


def _log_refused(refused: Mapping[Reason, int]) -> None:
    for reason, count in refused.items():
        logger.debug("%d bare chunks are not stored: %s", count, reason)
