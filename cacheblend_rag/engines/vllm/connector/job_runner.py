"""Runs each kind of job in a vLLM worker, over its model, paged cache and store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.copy_stream import release_buffers
from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.blend.stack import on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.blend.transfer import until
from cacheblend_rag.engines.after_answer import log_blend
from cacheblend_rag.engines.vllm.connector.metadata import Allotted
from cacheblend_rag.engines.vllm.connector.pace import OwnTime
from cacheblend_rag.engines.vllm.connector.paged import PagedAttention, PagedKV
from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache
from cacheblend_rag.engines.vllm.connector.stack import VLLMStack
from cacheblend_rag.engines.vllm.namespaces import NOT_FOR_TENANTS
from cacheblend_rag.engines.vllm.protocol.job import (
    CHANGES,
    Compare,
    Precompute,
    StoreJob,
    StoreKind,
)
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    CompareResult,
    EvictResult,
    Failed,
    LookupResult,
    PrecomputeResult,
    PrefetchResult,
    ReleaseResult,
    Result,
    VerifyResult,
)
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import READ_ONLY, PutResult
from cacheblend_rag.kv.writer import Writer
from cacheblend_rag.memory import give_back_unused, no_room
from cacheblend_rag.prefill.chunk_loader import begin_reading
from cacheblend_rag.prefill.comparing import Compared, Comparison, compare
from cacheblend_rag.prefill.conversation_kv import turn_fingerprint
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadInId, PlacedChunk
from cacheblend_rag.prefill.policy import NOT_STORED, Controller, Rates
from cacheblend_rag.prefill.precompute import (
    Computed,
    DocumentPlan,
    NoRoom,
    as_stored,
    compute_chunks,
    compute_document,
    compute_one_by_one,
)
from cacheblend_rag.prefill.prompt_pass import Destination, FusedPrompt, PromptPass
from cacheblend_rag.reason import Miss, Reason
from cacheblend_rag.report import Evicted
from cacheblend_rag.settings import BlendConfig

Work = Steps[Result]


class JobRunner:
    """Runs each kind of job over a worker's model, paged cache and store.

    identity: everything that this worker's KV depends on, the lead-in aside. rates: of passes and
    of vLLM's own prefill. own_time: a clock that runs while jobs run.
    """

    def __init__(
        self, stack: VLLMStack, cache: PagedCache, store: TieredKVStore, *, namespace: str
    ) -> None:
        self.stack, self.cache, self.store = stack, cache, store
        self.identity: dict[str, Any] = {}
        self._namespace = namespace
        self.rates, self.own_time = Rates(), OwnTime()

    def source(self, allotted: Allotted) -> LayerSource:
        """Begin to read the chunks that are blended, or compared."""
        return begin_reading(self.store, self._placed(allotted), self.stack)

    def work(self, allotted: Allotted, source: LayerSource) -> Work:
        """Do a request's work step by step; source: of the chunks to blend."""
        work = allotted.work
        if self.store.read_only and not isinstance(work, BlendConfig) and work.kind in CHANGES:
            return Failed(READ_ONLY)
        match work:
            case BlendConfig():
                return (yield from self._blend(allotted, work, source))
            case Precompute():
                return (yield from self._precompute(allotted, work))
            case Compare():
                return (yield from self._compare(allotted, work, source))
            case StoreJob():
                model = self._fingerprint(allotted, work.lead_in, of_turns=bool(work.conversation))
                keys = [KVKey(chunk, model, context) for chunk, context in work.keys]
                return (yield from STORE_JOBS[work.kind](self.store, keys))
            case _:
                is_own = allotted.namespace in {None, self._namespace}
                return self._release() if is_own else Failed(NOT_FOR_TENANTS)

    def no_room(self, allotted: Allotted, lack: str) -> BlendResult | Failed:
        """Return the result of a job that ran out of memory; vLLM serves its request."""
        if not allotted.is_blend:
            return Failed(no_room(lack))
        chunks = tuple(chunk.report(Miss.NO_ROOM) for chunk in self._placed(allotted))
        return self._declined(allotted, BlendResult(no_room(lack), chunks=chunks))

    def _declined(self, allotted: Allotted, told: BlendResult) -> BlendResult:
        """Return the result of a blend that ordinary prefill serves, behind a cached prefix."""
        costs, prefix = self.stack.costs, allotted.prefix
        saved = prefill_cost(costs, prefix) / prefill_cost(costs, len(allotted.tokens))
        reason = told.reason or NOT_STORED
        return replace(told, reason=reason, prefix_tokens=prefix, compute_share=1 - saved)

    def _placed(self, allotted: Allotted) -> list[PlacedChunk]:
        prints = {
            (lead, of_turns): self._fingerprint(allotted, lead, of_turns=of_turns)
            for lead, of_turns in {(one.name.lead_in, one.is_turn) for one in allotted.chunks}
        }
        return [one.placed(prints[one.name.lead_in, one.is_turn]) for one in allotted.chunks]

    def _release(self) -> ReleaseResult:
        """Free the memory of chunk KV, vLLM's own cache aside."""
        freed = self.store.release() + release_buffers(self.stack.geometry.device)
        give_back_unused()
        return ReleaseResult(freed)

    def _blend(self, allotted: Allotted, config: BlendConfig, source: LayerSource) -> Work:
        handed_over = time.perf_counter() - max(0.0, time.time() - allotted.arrived)
        work = self._pass(allotted, config, source)
        done = yield from work.steps()
        starts = {phase: max(0.0, at - handed_over) for phase, at in work.watch.starts.items()}
        told = BlendResult.of(done, starts=starts)
        if not isinstance(done, FusedPrompt):
            return self._declined(allotted, told)
        log_blend(allotted.request_id, done.chunks, done.seconds, done.load_by_tier)
        return replace(told, reason=None)

    def _pass(self, allotted: Allotted, config: BlendConfig, source: LayerSource) -> PromptPass:
        checks = plan_schedule(config, self.stack.geometry.layers).checks
        paged = PagedKV(
            self.cache,
            allotted.block_ids,
            allotted.first,
            allotted.until,
            PagedAttention(self.cache, allotted.until, allotted.shared),
        )
        return PromptPass(
            self.stack,
            token_tensor(allotted.tokens, self.stack.geometry.device),
            self._placed(allotted),
            source,
            config,
            destination=paged.holding(allotted.prefix),
            controller=Controller(
                self.stack.costs, self.rates, self.store.speeds, self.own_time.seconds
            ),
            lack_of_room=partial(self._lack_of_room, len(allotted.tokens), checks=bool(checks)),
            request_id=allotted.request_id,
        )

    def _compare(self, allotted: Allotted, job: Compare, source: LayerSource) -> Work:
        """Compare a prompt that is blended again, in a buffer of its own, with full prefill."""
        device = self.stack.geometry.device
        compared = Compared(job.tokens, job.answer, job.reference or None)
        checks = plan_schedule(job.config, self.stack.geometry.layers).checks
        if lack := self._lack_of_room(compared.longest, checks=bool(checks), whole=True):
            return Failed(no_room(lack))
        blended = PromptPass(
            self.stack,
            token_tensor(job.tokens, device),
            self._placed(allotted),
            source,
            job.config,
            destination=Destination(len(job.answer) - 1, needs_hidden=False),
        )
        done = yield from compare(self.stack, self.stack.logits, compared, blended)
        if not isinstance(done, Comparison):
            return Failed(done.reason or NOT_STORED)
        return CompareResult(done.blend, done.prefill)

    def _lack_of_room(
        self, tokens: int, *, checks: bool = False, whole: bool = False
    ) -> str | None:
        """Return why a pass over so many tokens does not fit beside vLLM on some rank, or None.

        vLLM has profiled its own needs only, and its own out-of-memory error would end the server.
        whole: whether the pass keeps all layers' KV.
        """
        needed = self.stack.pass_bytes(tokens, checks=checks)
        needed += FusedKV.bytes_for(self.stack.geometry, tokens) if whole else 0
        free = free_bytes(self.stack.geometry.device)
        if all(on_all_ranks(self.stack, [free is None or needed <= free])):
            return None
        there = "less" if free is None or needed <= free else f"{free >> 20:,} MiB"
        return (
            f"blending {tokens:,} tokens needs {needed >> 20:,} MiB of device memory beside "
            f"vLLM's, there is {there}: serve with a smaller --gpu-memory-utilization"
        )

    def _precompute(self, allotted: Allotted, job: Precompute) -> Work:
        if lack := self._lack_of_room(len(job.tokens)):
            return Failed(no_room(lack))
        writer = Writer()
        try:
            return (yield from self._written(allotted, job, writer))
        finally:
            writer.close(wait=False)

    def _written(self, allotted: Allotted, job: Precompute, writer: Writer) -> Work:
        """Compute chunks while earlier ones are written."""
        model = self._fingerprint(allotted, job.lead_in, of_turns=bool(job.conversation))
        plans = job.plans(model)
        keys = [plan.key for plan in plans]
        counts = Counter[str]()
        puts, lost = list[tuple[KVKey, Future[PutResult]]](), set[KVKey]()
        for done in self._computed(job, plans):
            if isinstance(done, NoRoom):
                lost |= {plan.key for plan in done.chunks}
            elif done is not None:
                plan, kv = done
                counts["computed"] += 1
                counts["tokens"] += kv.tokens
                put = writer.submit(kv.nbytes, partial(self.store.put, plan.key, kv))
                puts.append((plan.key, put))
                yield from until(self.stack, writer.has_room)
            yield
        yield from until(self.stack, lambda: all(put.done() for _, put in puts))
        results = [(key, put.result()) for key, put in puts]
        refused = [(put.refusal, put.failure) for _, put in results if put.refusal]
        fresh = {key for key, put in results if put}
        lost |= {key for key, put in results if not put}
        return PrecomputeResult(
            computed=len(results) - len(refused),
            skipped=len(keys) - counts["computed"],
            computed_tokens=counts["tokens"],
            refused=dict(Counter(reason for reason, _ in refused)),
            failed=dict(Counter(reason for reason, failure in refused if failure)),
            fresh=tuple(i for i, key in enumerate(keys) if key in fresh),
            lost=tuple(i for i, key in enumerate(keys) if key in lost),
        )

    def _computed(self, job: Precompute, plans: list[ChunkPlan]) -> Computed:
        """Compute a document's chunks that are not stored, after the job's lead-in."""
        if job.lead_in.name != "document" and not job.conversation:
            return compute_chunks(
                self.stack,
                plans,
                self.store,
                alone=lambda chunks: compute_one_by_one(self.stack, chunks, self.store),
                in_document=False,
            )
        starts = [start for start, _ in job.chunks]
        document = DocumentPlan(list(job.tokens), list(zip(plans, starts, strict=True)))
        computed = compute_document(self.stack, document, self.store)
        return as_stored(self.stack, self.store, computed)

    def _fingerprint(self, allotted: Allotted, lead: LeadInId, *, of_turns: bool) -> str:
        """Return the fingerprint of a job's keys; the namespace is the request's own."""
        namespace = self._namespace if allotted.namespace is None else allotted.namespace
        of_chunks = lead.fingerprint(self.identity, namespace)
        return turn_fingerprint(of_chunks) if of_turns else of_chunks


def verify(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    """Check stored KV, one key at a time; damaged KV is quarantined."""
    lost: dict[str, Reason] = {}
    for key in keys:
        for _, reason in store.unreadable([key]):
            lost[f"{key.chunk_id}/{key.context_id}"] = reason
        yield
    return VerifyResult(len(keys), lost)


def lookup(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    """Find out which keys are stored, one at a time."""
    told: list[bool | None] = []
    for key in keys:  # each may wait for a tier
        told += store.stored_many([key])
        yield
    return LookupResult.of(told)


def evict(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    """Drop chunk KV, one key at a time."""
    evicted = Evicted()
    for key in keys:  # each may wait for a disk
        evicted += store.evict(key)
        yield
    return EvictResult(int(evicted), pending=evicted.pending, noted=evicted.is_noted)


def prefetch(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    """Prefetch chunk KV, one key at a time."""
    for key in keys:
        store.prefetch([key])
        yield
    return PrefetchResult()


def free_bytes(device: torch.device) -> int | None:
    """Return a device's free bytes, PyTorch's caches included; None on a CPU."""
    if device.type != "cuda":
        return None
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserved


STORE_JOBS: Mapping[StoreKind, Callable[[TieredKVStore, Sequence[KVKey]], Work]] = {
    "lookup": lookup,
    "verify": verify,
    "evict": evict,
    "prefetch": prefetch,
}
