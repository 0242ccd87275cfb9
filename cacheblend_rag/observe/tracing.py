"""OpenTelemetry spans of requests: one each, and one below it for each phase.

Names are those of the conventions for generative AI, which are still in development (``gen_ai.*``,
as in ``SEMANTIC_CONVENTIONS``), and of OpenInference (``openinference.*``, ``llm.*``); what neither
has is under ``cacheblend.*``. No text of a prompt or an answer is in a span.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cacheblend_rag.engines.after_answer import RequestWatcher
from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.report import REASONS, BlendReport, PhaseSeconds, PhaseStarts, count_chunks
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

SEMANTIC_CONVENTIONS = "1.44.0"
"""The version of OpenTelemetry's semantic conventions that the names are taken from."""
SCOPE = "cacheblend_rag"
OURS = "cacheblend."
GIVEN_UP = "cancelled"
PHASES = tuple(one.name for one in fields(PhaseStarts))
NANOSECONDS = 1_000_000_000

Value = str | bool | int | float | tuple[str, ...]
"""What an attribute of a span may be."""


def trace_requests(engine: Engine, tracer_provider: TracerProvider | None = None) -> None:
    """Make OpenTelemetry spans of an engine's requests from now on; call it once an engine.

    A request's span is a child of the span in which its caller asks, in threads, tasks, streams
    and batches. With a vLLM server, the header ``traceparent`` makes vLLM's own spans children of
    it. Siblings of the engine are not traced.

    Args:
        engine: any engine.
        tracer_provider: where spans go; None is OpenTelemetry's global one.

    Raises:
        MissingExtraError: without the extra ``tracing``.
    """
    engine.after_answer(_Tracing(engine, tracer_provider))


@dataclass(frozen=True)
class _Begun:
    """A request at work: its span, and when it began, by the wall clock and by perf_counter."""

    span: Span
    wall_ns: int
    reading: float

    def at(self, seconds: float) -> int:
        """Return the time of a span's event, so many seconds after the request began."""
        return self.wall_ns + round(seconds * NANOSECONDS)

    def now(self) -> int:
        """Return the present time."""
        return self.at(time.perf_counter() - self.reading)


class _Tracing(RequestWatcher):
    """Begins a span when a request begins, and ends it from the report."""

    def __init__(self, engine: Engine, tracer_provider: TracerProvider | None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtraError("tracing requests", "tracing") from error
        self._trace = trace
        self._tracer = trace.get_tracer(
            SCOPE,
            version("cacheblend-rag"),
            tracer_provider,
            f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}",
        )
        self._propagator = TraceContextTextMapPropagator()
        self._facts = _facts(engine)
        self._kind = trace.SpanKind.CLIENT if _is_remote(engine) else trace.SpanKind.INTERNAL
        self._begun: dict[str, _Begun] = {}
        self._lock = Lock()

    def begins(self, request: Request) -> Request:
        with self._lock:  # a request that begins again goes on with its span
            begun = self._begun.get(request.request_id)
            if begun is None:
                begun = self._begun[request.request_id] = self._begin(request)
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._trace.set_span_in_context(begun.span))
        return replace(request, headers={**request.headers, **headers})

    def _begin(self, request: Request) -> _Begun:
        reading = request.made_at - request.prepared.seconds
        wall_ns = time.time_ns() - round((time.perf_counter() - reading) * NANOSECONDS)
        operation = _operation(request.prepared)
        span = self._tracer.start_span(
            f"{operation} {self._facts['gen_ai.request.model']}",
            kind=self._kind,
            attributes={**self._facts, **_asked(request, operation)},
            start_time=wall_ns,
        )
        return _Begun(span, wall_ns, reading)

    def __call__(self, request: Request, answer: Generation) -> None:
        begun = self._taken(request)
        if begun is None:
            return
        ended = begun.now()
        if begun.span.is_recording():
            begun.span.set_attributes(dict(_answered(answer)))
            self._add_phases(begun, answer.report, ended)
        begun.span.end(ended)

    def failed(self, request: Request, error: BaseException) -> None:
        begun = self._taken(request)
        if begun is None:
            return
        if isinstance(error, Exception):
            kind = type(error).__qualname__
            begun.span.set_attribute("error.type", kind)
            begun.span.set_status(self._trace.StatusCode.ERROR, kind)
        else:
            begun.span.set_attribute("gen_ai.response.finish_reasons", (GIVEN_UP,))
        begun.span.end(begun.now())

    def _taken(self, request: Request) -> _Begun | None:
        with self._lock:
            return self._begun.pop(request.request_id, None)

    def _add_phases(self, begun: _Begun, report: BlendReport, ended: int) -> None:
        """Add a span for each phase, from its first start on, and as long as it took."""
        below = self._trace.set_span_in_context(begun.span)
        for phase in PHASES:
            start, seconds = getattr(report.starts, phase), getattr(report.seconds, phase)
            if start is None or not seconds:
                continue
            span = self._tracer.start_span(
                f"{OURS}{phase}",
                below,
                start_time=min(begun.at(start), ended),
                attributes={"openinference.span.kind": "CHAIN", f"{OURS}phase": phase},
            )
            span.end(min(begun.at(start + seconds), ended))


def _facts(engine: Engine) -> dict[str, Value]:
    """Return the attributes that all requests of an engine have in common."""
    provider = engine.name.removesuffix("-server")
    told: dict[str, Value] = {
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": engine.model_name,
        "gen_ai.response.model": engine.model_name,
        "gen_ai.output.type": "text",
        "openinference.span.kind": "LLM",
        "llm.provider": provider,
        "llm.model_name": engine.model_name,
    }
    if _is_remote(engine):
        url = urlsplit(engine.address)
        told["server.address"] = url.hostname or ""
        told["server.port"] = url.port or (443 if url.scheme == "https" else 80)
    return told


def _is_remote(engine: Engine) -> bool:
    return "://" in engine.address


def _operation(prepared: PreparedPrompt) -> str:
    source = prepared.source.prompt if isinstance(prepared.source, TurnPrompt) else prepared.source
    return "text_completion" if isinstance(source, str | BlendPrompt) else "chat"


def _asked(request: Request, operation: str) -> dict[str, Value]:
    """Return the attributes of a request that are known when it begins."""
    sampling = request.sampling
    told: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
    }
    named = {name.rpartition(".")[2]: value for name, value in told.items() if value is not None}
    return {
        "gen_ai.operation.name": operation,
        **{name: value for name, value in told.items() if value is not None},
        **({"gen_ai.request.stream": True} if request.streamed else {}),
        "llm.invocation_parameters": json.dumps(named),
        f"{OURS}request_id": request.request_id,
    }


def _answered(answer: Generation) -> Iterator[tuple[str, Value]]:
    """Yield the attributes of an answer and its report."""
    report, generated = answer.report, len(answer.token_ids)
    first = report.seconds.time_to_first_token
    yield "gen_ai.response.id", report.request_id
    yield "gen_ai.response.finish_reasons", (answer.finish_reason,)
    yield "gen_ai.usage.input_tokens", report.prompt_tokens
    yield "gen_ai.usage.output_tokens", generated
    yield "gen_ai.usage.cache_read.input_tokens", report.reused_tokens
    yield "gen_ai.response.time_to_first_chunk", first
    yield "gen_ai.server.time_to_first_token", first
    yield "llm.token_count.prompt", report.prompt_tokens
    yield "llm.token_count.completion", generated
    yield "llm.token_count.total", report.prompt_tokens + generated
    yield "llm.token_count.prompt_details.cache_read", report.reused_tokens
    yield from _blended(report)


def _blended(report: BlendReport) -> Iterator[tuple[str, Value]]:
    """Yield our own attributes of a report."""
    yield f"{OURS}engine", report.engine
    yield f"{OURS}blended", report.blended
    yield f"{OURS}recompute_ratio", float(report.recompute_ratio)
    yield f"{OURS}selector", report.selector
    yield f"{OURS}lead_in", report.lead_in
    yield f"{OURS}compute_share", float(report.compute_share)
    for name in ("reused", "recomputed", "computed", "prefix"):
        yield f"{OURS}{name}_tokens", getattr(report, f"{name}_tokens")
    for name in REASONS:
        reason = getattr(report, name)
        if reason is not None:
            yield f"{OURS}{name}_code", reason.code.value
    hits, misses = count_chunks(report.chunks)
    yield f"{OURS}chunk_hits", hits.total()
    yield f"{OURS}chunk_misses", misses.total()
    for tier, count in hits.items():
        yield f"{OURS}chunk_hits_by_tier.{tier.replace(' ', '_')}", count
    for code, count in misses.items():
        yield f"{OURS}chunk_misses_by_reason.{code}", count
    yield from _seconds(report.seconds)


def _seconds(seconds: PhaseSeconds) -> Iterator[tuple[str, Value]]:
    """Yield how long each phase took; of those by tier, how long each tier."""
    for name, value in asdict(seconds).items():
        if isinstance(value, Mapping):
            for part, of_it in value.items():
                yield f"{OURS}seconds.{name}.{part}", float(of_it)
        elif value:
            yield f"{OURS}seconds.{name}", float(value)
