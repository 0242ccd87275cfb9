"""Index time: registers chunks, and computes, stores, verifies and evicts their KV."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from weakref import ref

from tqdm import tqdm

from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.known_chunks import (
    Item,
    KnownChunks,
    Unneeded,
    chunks_of,
    whole_documents,
)
from cacheblend_rag.engines.lifetime import Lifetime, working
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import READ_ONLY
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import Evicted, PrecomputeReport
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

Store = Callable[[Sequence[ChunkPlan]], Generator[PrecomputeReport]]

EMPTY = Reason(ReasonCode.EMPTY, "empty text")
FORGOTTEN = Reason(ReasonCode.FORGOTTEN, "forgotten meanwhile")
"""The reason for chunks whose KV was dropped again, since another writer has removed them."""
TOO_LONG = Reason(ReasonCode.TOO_LONG, "longer than the context window")


class Indexing(Backend):
    """Keeps a registry's chunks, and their stored KV, consistent."""

    registry: ChunkRegistry
    _lifetime: Lifetime
    _led: LeadIn

    @property
    def _known(self) -> KnownChunks:
        return KnownChunks(self.registry, self._led)

    def register(self, items: Iterable[Item]) -> None:
        """Register chunks without computing anything (after a restart, say)."""
        self._lifetime.check()
        self.registry.add_many([chunk for item in items for chunk in chunks_of(item)])

    def precompute(
        self,
        items: Iterable[Item],
        *,
        progress: bool = True,
        register_only: bool = False,
        verify: bool = False,
    ) -> PrecomputeReport:
        """Register chunks and store their KV; chunks that are stored already are skipped.

        A Document replaces the one with its document_id in its collection: chunks that it no longer
        has are forgotten and their KV dropped. Several Documents with one document_id in one call
        are variants that are kept side by side. An interrupted run continues where it stopped.

        Args:
            items: chunks, documents, or texts that stand alone.
            progress: whether to show a progress bar.
            register_only: compute nothing now; documents still replace their earlier versions. An
                engine with ``fill_on_miss`` computes the chunks that requests miss.
            verify: check chunks that are stored already, and recompute damaged ones.

        Returns:
            How many chunks were computed, skipped, refused and replaced, or only registered. If
            ``failed`` is above 0, a tier failed or memory was short: call it again later.

        Raises:
            StoreError: when the store is read only.
        """
        self._begin_writing()
        started, refused = time.perf_counter(), Counter[Reason]()
        chunks, replaced = self._replace(items, refused)
        total = PrecomputeReport(refused=dict(refused), replaced=replaced)
        if register_only:
            seconds = time.perf_counter() - started
            return replace(total, registered=len(chunks), seconds=seconds)
        refusal = self._storing_refusal() if chunks else None
        with tqdm(total=len(chunks), desc="precompute", unit="chunk", disable=not progress) as bar:
            for part in whole_documents(chunks, self.part_chunks):
                with closing(self._store_part(part, refusal, verify)) as steps:
                    for done in steps:
                        total += done
                        bar.update(done.chunks)
                        self._lifetime.check()
                total += PrecomputeReport(refused={FORGOTTEN: self._drop_forgotten(part)})
        return replace(total, seconds=time.perf_counter() - started)

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks, and documents by their ids, into the fastest tier."""
        self._lifetime.check()
        if keys := self._known.hinted(hints):
            self._prefetch(keys)

    def evict_document(
        self, document_id: str, collection: str | None = None, *, kept: Sequence[Chunk] = ()
    ) -> Evicted:
        """Forget a document's chunks and drop their KV.

        Args:
            document_id: the document.
            collection: only the chunks of this collection; None is all.
            kept: chunks that the document still has.

        Returns:
            How many chunks were dropped, a number; ``pending`` names the tiers that did not answer.

        Raises:
            StoreError: when the registry cannot be written, or the store is read only.
        """
        self._begin_writing()
        self.registry.refresh()
        found, left = self.registry.document(document_id, collection), frozenset(kept)
        chunks = [chunk for chunk in found if chunk not in left]
        # KV first: on a full disk, changing the registry needs that room.
        dropped = self._drop(self._known.unneeded(chunks, besides=frozenset(chunks)))
        self.registry.discard_many(chunks)
        return dropped + self._drop(self._known.unneeded(chunks))  # that others stored in between

    def evict_unregistered(self) -> Evicted:
        """Drop this engine's chunk KV that belongs to no registered chunk.

        Killed writers can leave such KV. Returns how many were dropped, as ``evict_document``.

        Raises:
            ConfigError: when the engine cannot list its stored chunks.
        """
        self._begin_writing()
        return self._evict(self._known.unregistered(self._stored_keys()))

    def release(self) -> int:
        """Free the memory of chunk KV, on host and device; returns how many bytes that were.

        Chunks stay registered, and stored on disk, in Redis and in object stores, from where
        requests read them again. Chunks that were in memory only are computed again
        (``not stored``). Chunks that wait to be written, are being read, or are pinned, stay in
        memory until then. Buffers for copies and PyTorch's cached memory are freed, too. The engine
        stays open. Engines around one store, such as siblings, share its memory.
        """
        self._lifetime.check()
        return self._release()

    def _begin_writing(self) -> None:
        self._lifetime.check()
        if self.read_only:
            raise StoreError(READ_ONLY)

    def _watch_registry(self) -> None:
        """Drop the KV of chunks that another writer forgets."""
        me = ref(self)  # a shared registry may outlive the engine

        def forget(chunks: Sequence[Chunk]) -> None:
            if (engine := me()) is not None and engine._lifetime.is_open:
                gone = engine._known.unneeded(chunks)
                engine._forget([*gone.keys, *gone.bare])

        self.registry.watch(forget)

    # Registered chunks

    def _replace(
        self, items: Iterable[Item], refused: Counter[Reason]
    ) -> tuple[list[Chunk], Evicted]:
        """Register items, and drop the KV of chunks that new versions of documents lack.

        Returns the chunks, and for how many KV was dropped; chunks of white space are counted as
        refused.
        """
        given: list[Chunk] = []
        bounded: dict[tuple[str, str], bool] = {}
        for item in items:
            chunks = chunks_of(item)
            given += [chunk for chunk in chunks if chunk.text.strip()]
            if empty := sum(not chunk.text.strip() for chunk in chunks):
                refused[EMPTY] += empty
            if isinstance(item, Document):
                one = item.document_id, item.collection
                bounded[one] = bool(item.boundaries) or bounded.get(one, False)
        stale = self._known.replace(bounded, given)
        behind = [c for c in stale if bounded[c.document_id or "", c.collection]]
        replaced = self._forget_priors(behind) + self._drop(self._known.unneeded(stale))
        if replaced:
            logger.info(
                "%d chunks of changed documents were replaced; to keep other pieces of the same "
                "documents, give each index a collection= of its own",
                replaced,
            )
        return given, replaced

    def _forget_priors(self, chunks: Iterable[Chunk]) -> Evicted:
        """Drop KV without a context in its key, for chunks of documents with boundaries.

        Its prior may depend on text that a new boundary hides.
        """
        if self._led.name == "document":
            return Evicted()
        return self._drop(Unneeded(self._known.keys(chunks)))

    def _drop_forgotten(self, chunks: Iterable[Chunk]) -> int:
        """Drop the KV of just stored chunks that another writer has forgotten meanwhile.

        The other writer could not: it dropped KV before these chunks were stored.
        """
        self.registry.refresh()
        return self._drop(self._known.unneeded(chunks))

    def _drop(self, unneeded: Unneeded) -> Evicted:
        """Drop KV; returns for how many keys that are not bare there was some."""
        bare = self._evict(unneeded.bare) if unneeded.bare else Evicted()
        return self._evict(unneeded.keys) + Evicted(0, bare.pending, is_noted=bare.is_noted)

    # Computing and storing

    def _fill_missed(self, chunks: Sequence[Chunk]) -> Generator[PrecomputeReport]:
        """Store chunks in idle time, except those that are forgotten before or meanwhile."""
        with working():
            known = [chunk for chunk in chunks if self._known.has(chunk)]
            refusal = self._storing_refusal() if known else None
            plans, done = self._admitted(known, refusal)
        yield done
        if plans:
            yield from self._stored_with_bare(known, plans, self._fill)
        lost = len(chunks) - len(known) + self._drop_forgotten(known)
        yield PrecomputeReport(refused={FORGOTTEN: lost} if lost else {})

    def _store_part(
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
            yield from self._stored_with_bare(chunks, plans, self._store, verify=verify)

    def _stored_with_bare(
        self,
        chunks: Sequence[Chunk],
        plans: Sequence[ChunkPlan],
        store: Store,
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
        chosen = [chunk for chunk in chunks if self._led.key(chunk) in planned]
        admitted, done = self._admitted(self._known.bare(chosen), None)
        return admitted, done.refused

    def _verified(self, plans: Sequence[ChunkPlan]) -> tuple[list[ChunkPlan], list[Reason]]:
        """Check stored KV; returns the plans but for those whose KV is unreadable, and why."""
        lost = self._verify([plan.key for plan in plans])
        return [plan for plan in plans if plan.key not in lost], list(lost.values())

    def _admitted(
        self, chunks: Iterable[Chunk], refusal: Reason | None
    ) -> tuple[list[ChunkPlan], PrecomputeReport]:
        """Return the distinct chunks that can be stored, and the results of the others."""
        plans: dict[KVKey, ChunkPlan] = {}
        refused: Counter[Reason] = Counter()
        admitted = 0
        for chunk in chunks:
            plan = self._led.resolve(chunk)
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
        behind = plan.context if self._led.name == "document" else ()
        return None if self._fits(plan, behind) else TOO_LONG

    def _fits(self, plan: ChunkPlan, behind: tuple[int, ...]) -> bool:
        """Whether a chunk can be computed after its lead-in and some more tokens."""
        tokens = len(plan.lead) + len(behind) + len(plan.token_ids)
        return tokens <= self._longest_run


def _log_refused(refused: Mapping[Reason, int]) -> None:
    for reason, count in refused.items():
        logger.debug("%d bare chunks are not stored: %s", count, reason)
