"""Jobs of engines in other processes, done by the embedded engine of a server."""

from __future__ import annotations

from contextlib import closing
from importlib.metadata import version
from threading import Event
from typing import TypeVar, assert_never

from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.lifetime import in_thread
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.engine import TransformersEngine
from cacheblend_rag.engines.vllm.protocol.job import Ask, Compare, Job, Precompute, StoreJob
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_REPORT,
    CompareResult,
    ConnectorStatus,
    EvictResult,
    Failed,
    LookupResult,
    PrecomputeResult,
    PrefetchResult,
    ReleaseResult,
    Result,
    StoredKV,
    VerifyResult,
)
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.chunk_kv import KVKey, namespace_id
from cacheblend_rag.kv.stored_chunk import READ_ONLY
from cacheblend_rag.prefill.comparing import Compared
from cacheblend_rag.prefill.policy import NOT_STORED
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import PrecomputeReport

T = TypeVar("T")


async def carry_out(engine: Engine, job: Job) -> Result:
    """Have a server's engine do a job, and return its result; cancelling it stops the work."""
    if (does := getattr(engine, "carry_out", None)) is not None:  # vLLM's hands it on
        done: Result = await does(job)
        return done
    if not isinstance(engine, TransformersEngine):
        return Failed(Reason(ReasonCode.NO_CONNECTOR, f"a {engine.name} engine does no jobs"))
    stop = Event()
    try:
        return await in_thread(lambda: _done(engine, job, stop))
    finally:
        stop.set()


def _done(engine: TransformersEngine, job: Job, stop: Event) -> Result:
    try:
        match job:
            case Precompute():
                return _precomputed(engine, job, stop)
            case Compare():
                return _compared(engine, job, stop)
            case StoreJob():
                return _of_store(engine, job)
            case Ask():
                return _told(engine, job)
            case _:
                assert_never(job)
    except CacheBlendError as error:
        return Failed(Reason(ReasonCode.FAILED, str(error)))


def _precomputed(engine: TransformersEngine, job: Precompute, stop: Event) -> Result:
    refusal = engine._storing_refusal()
    if refusal is not None:
        return Failed(refusal)
    model = engine.found_chunks.fingerprint(job.lead_in, of_turns=bool(job.conversation))
    steps = engine.compute_and_store(
        job.plans(model), job.lead_in, conversation=job.conversation, when_idle=job.idle
    )
    total = PrecomputeReport()
    with closing(steps):
        for done in steps:
            total += done
            if stop.is_set():
                break
    return PrecomputeResult(
        computed=total.computed,
        skipped=total.skipped,
        computed_tokens=total.computed_tokens,
        refused=total.refused,
        failed=total.failed,
    )


def _compared(engine: TransformersEngine, job: Compare, stop: Event) -> Result:
    prompt = engine.prepare_tokens(job.tokens, conversation=job.conversation, until=job.until)
    sampling = SamplingParams.greedy(max_tokens=len(job.answer))
    request = engine._request(prompt, sampling, job.config, steered=False)
    compared = Compared(job.tokens, job.answer, job.reference or None)
    found = _unless(stop, engine._compare(request, compared))
    if found is None:
        return Failed(NOT_STORED)
    return CompareResult(found.blend, found.prefill)


def _unless(stop: Event, steps: Steps[T]) -> T | None:
    """Run steps to their end and return their result; None if ``stop`` is set before."""
    with closing(steps):
        while not stop.is_set():
            try:
                next(steps)
            except StopIteration as done:
                found: T = done.value
                return found
    return None


def _of_store(engine: TransformersEngine, job: StoreJob) -> Result:
    model = engine.found_chunks.fingerprint(job.lead_in, of_turns=bool(job.conversation))
    keys = [KVKey(chunk, model, context) for chunk, context in job.keys]
    match job.kind:
        case "lookup":
            return LookupResult.of(engine.stored(keys))
        case "verify":
            if engine.read_only:
                return Failed(READ_ONLY)
            lost = engine._verify(keys).items()
            told = {f"{key.chunk_id}/{key.context_id}": why for key, why in lost}
            return VerifyResult(len(keys), told)
        case "evict":
            if engine.read_only:
                return Failed(READ_ONLY)
            evicted = engine.evict_stored(keys, job.lead_in, job.conversation)
            return EvictResult(int(evicted), evicted.pending, evicted.is_noted)
        case "prefetch":
            engine._prefetch(keys)
            return PrefetchResult()


def _told(engine: TransformersEngine, job: Ask) -> Result:
    match job.kind:
        case "report":  # answers have theirs with them
            return NO_REPORT
        case "release":
            return ReleaseResult(engine.release())
        case "status":
            return ConnectorStatus(
                active=engine.blend_refusal is None,
                refusal=engine.blend_refusal,
                identity=engine.fingerprint,
                cacheblend_rag=version("cacheblend-rag"),
                namespace=namespace_id(engine.namespace),
                read_only=engine.read_only,
                store=StoredKV(engine.stored_chunks(), None),
                sampling=engine.model_sampling,
                token_bytes=engine._token_bytes,
            )
