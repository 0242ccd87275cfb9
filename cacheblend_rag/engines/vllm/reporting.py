"""Builds a request's PrefillReport from the connector's result and the client's measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cacheblend_rag.engines.answer import FULL_PREFILL, Request
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    BlendResult,
    Failed,
    Result,
)
from cacheblend_rag.prefill.policy import NO_CHUNK, NOT_STORED
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, PrefillReport
from cacheblend_rag.trace import Trace

PHASES = frozenset({"look_up", "load", "lay_in", "early_layers", "selection", "recompute"})
"""Phases that the worker measures; the client measures the others."""


@dataclass(frozen=True)
class Times:
    """When a request was sent, a reading of ``time.perf_counter``, and how long vLLM took.

    first: seconds to the first token. rest: seconds of decoding.
    """

    started: float
    first: float
    rest: float


def prefill_report(
    request: Request,
    result: Result | None,
    times: Times,
    *,
    cancelled: bool,
    refusal: Reason | None,
) -> PrefillReport:
    """Return the connector's result as a report, with the seconds measured by the client.

    refusal: why vLLM stores and blends nothing, as it told last.
    """
    done = result if isinstance(result, BlendResult) else BlendResult()
    chunks = _told(request, done)
    blended = any(chunk.hit for chunk in chunks)
    phases, by_tier = _phases(done, times.first)
    first_token = max(0.0, times.first - math.fsum(phases.values()))
    starts = {
        name: min(max(0.0, done.starts[name]), times.first) for name in PHASES & done.starts.keys()
    }
    starts["first_token"] = times.first - first_token
    if times.rest > 0:
        starts["decode"] = times.first
    return replace(
        done,
        reason=None if blended else _reason(request, result, refusal, cancelled=cancelled),
        chunks=chunks,
        seconds={
            **phases,
            "load_hidden": done.seconds.get("load_hidden", 0.0),
            "first_token": first_token,
            "decode": times.rest,
        },
        starts={name: times.started + seconds for name, seconds in starts.items()},
        trace=_trace(request, done),
        load_by_tier=by_tier,
        prefix_tokens=min(max(done.prefix_tokens, 0), chunks[0].start) if chunks else 0,
        was_run=True,
    )


def _phases(done: BlendResult, first: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the worker's seconds by phase, and those of loading by tier.

    They are scaled down if they do not fit within the time to the first token.
    """
    phases = {name: done.seconds.get(name, 0.0) for name in PHASES}
    whole = math.fsum(phases.values())
    scale = 1.0 if whole <= first else first / whole
    by_tier = {tier: seconds * scale for tier, seconds in done.load_by_tier.items()}
    return {name: seconds * scale for name, seconds in phases.items()}, by_tier


def _trace(request: Request, done: BlendResult) -> Trace | None:
    """Return the trace; None if it was not asked for, or does not fit the prompt."""
    fits = done.trace is not None and done.trace.fits(len(request.prepared.token_ids))
    return done.trace if request.config.trace and fits else None


def _reason(
    request: Request, result: Result | None, refusal: Reason | None, *, cancelled: bool
) -> Reason:
    """Return why nothing was reused."""
    if request.full:
        return FULL_PREFILL
    if request.steering.refusal is not None:
        return request.steering.refusal
    match result:
        case BlendResult(reason=why) if why == NO_CHUNK and request.prepared.placed:
            return refusal or NOT_STORED
        case BlendResult(reason=why):
            return why or NOT_STORED
        case Failed(error=why):
            return why
        case _ if cancelled:
            return Reason(ReasonCode.CANCELLED, "cancelled before it was told")
        case _:
            return NO_CONNECTOR


def _told(request: Request, done: BlendResult) -> tuple[ChunkReport, ...]:
    """Return the reports of chunks that vLLM found, and of known ones where it found nothing.

    The tokens of a known chunk may have been found in another one that has them, too.
    """
    placed = () if request.full else request.prepared.placed
    miss = Miss.NOT_STORED if request.steering.refusal is None else Miss.GUARD_STOPPED
    known = {(one.key.chunk_id, one.start): one.document_id for one in placed}
    chunks = [
        replace(chunk, document_id=known.get((chunk.chunk_id, chunk.start)))
        for chunk in done.chunks
    ]
    missed = [
        one.report(miss)
        for one in placed
        if not any(c.start < one.end and one.start < c.start + c.tokens for c in chunks)
    ]
    return tuple(sorted((*chunks, *missed), key=lambda chunk: chunk.start))
