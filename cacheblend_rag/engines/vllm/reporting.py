"""Builds a request's PrefillReport from the connector's result and the client's measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cacheblend_rag.engines.answer import FinishReason
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    BlendResult,
    Failed,
    Result,
)
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import NO_CHUNK, NOT_STORED
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, PrefillReport
from cacheblend_rag.trace import Trace

PHASES = frozenset({"look_up", "load", "lay_in", "early_layers", "selection", "recompute"})
"""Phases that the worker measures; the client measures the others."""


@dataclass(frozen=True)
class Sent:
    """A request to vLLM, with the chunks to reuse, or why none is reused.

    missed: the miss reason of chunks that are not to be reused. refusal: why vLLM stores and blends
    nothing, as it told last.
    """

    request: VLLMRequest
    placed: tuple[PlacedChunk, ...] = ()
    reason: Reason | None = None
    missed: Reason | None = None
    refusal: Reason | None = None


@dataclass(frozen=True)
class Times:
    """When a request was sent, a reading of ``time.perf_counter``, and how long vLLM took.

    first: seconds to the first token. rest: seconds of decoding.
    """

    started: float
    first: float
    rest: float


def prefill_report(
    sent: Sent, finish_reason: FinishReason, result: Result | None, times: Times
) -> PrefillReport:
    """Return the connector's result as a report, with the seconds measured by the client."""
    done = result if isinstance(result, BlendResult) else BlendResult()
    chunks = _told(sent, done)
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
        reason=None if blended else _reason(sent, finish_reason, result),
        chunks=chunks,
        seconds={
            **phases,
            "load_hidden": done.seconds.get("load_hidden", 0.0),
            "first_token": first_token,
            "decode": times.rest,
        },
        starts={name: times.started + seconds for name, seconds in starts.items()},
        trace=_trace(sent, done),
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


def _trace(sent: Sent, done: BlendResult) -> Trace | None:
    """Return the trace; None if it was not asked for, or does not fit the prompt."""
    is_asked = sent.request.wish.config.get("trace")
    fits = done.trace is not None and done.trace.fits(len(sent.request.token_ids))
    return done.trace if is_asked and fits else None


def _reason(sent: Sent, finish_reason: FinishReason, result: Result | None) -> Reason:
    """Return why nothing was reused."""
    if sent.reason:
        return sent.reason
    match result:
        case BlendResult(reason=why) if why == NO_CHUNK and sent.placed:
            return sent.refusal or NOT_STORED
        case BlendResult(reason=why):
            return why or NOT_STORED
        case Failed(error=why):
            return why
        case _ if finish_reason == "cancelled":
            return Reason(ReasonCode.CANCELLED, "cancelled before it was told")
        case _:
            return NO_CONNECTOR


def _told(sent: Sent, done: BlendResult) -> tuple[ChunkReport, ...]:
    """Return the reports of chunks that vLLM found, and of known ones where it found nothing.

    The tokens of a known chunk may have been found in another one that has them, too.
    """
    known = {(one.key.chunk_id, one.start): one.document_id for one in sent.placed}
    chunks = [
        replace(chunk, document_id=known.get((chunk.chunk_id, chunk.start)))
        for chunk in done.chunks
    ]
    missed = [
        one.report(sent.missed or Miss.NOT_STORED)
        for one in sent.placed
        if not any(c.start < one.end and one.start < c.start + c.tokens for c in chunks)
    ]
    return tuple(sorted((*chunks, *missed), key=lambda chunk: chunk.start))
