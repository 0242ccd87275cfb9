"""OpenTelemetry spans: one for each request, with a child span for each phase.

Names are those of the conventions for generative AI, which are still in development (``gen_ai.*``,
as in ``SEMANTIC_CONVENTIONS``), and of OpenInference (``openinference.*``, ``llm.*``); what neither
has is under ``cacheblend.*``. No text of a prompt or an answer is in a span.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cacheblend_rag.engines.after_answer import RequestWatcher
from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.report import REASONS, BlendReport, PhaseStarts, count_chunks
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

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
TOLD = (
    "engine", "blended", "recompute_ratio", "selector", "lead_in", "compute_share",
    "reused_tokens", "recomputed_tokens", "computed_tokens", "prefix_tokens",
)  # fmt: skip
"""Fields of a report that are attributes of our own."""
Attributes = dict[str, Any]


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
        schema = f"https://opentelemetry.io/schemas/{SEMANTIC_CONVENTIONS}"
        own = version("cacheblend-rag")
        self._trace = trace
        self._tracer = trace.get_tracer(SCOPE, own, tracer_provider, schema)
        self._propagator = TraceContextTextMapPropagator()
        self._facts = _facts(engine)
        is_remote = "server.address" in self._facts
        self._kind = trace.SpanKind.CLIENT if is_remote else trace.SpanKind.INTERNAL
        self._begun: dict[str, _Begun] = {}

    def begins(self, request: Request) -> Request:
        # A request that begins again goes on with its span.
        begun = self._begun.get(request.request_id) or self._begin(request)
        self._begun[request.request_id] = begun
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
        begun = self._begun.pop(request.request_id, None)
        if begun is None:
            return
        ended = begun.now()
        if begun.span.is_recording():
            begun.span.set_attributes({**_answered(answer), **_blended(answer.report)})
            self._add_phases(begun, answer.report, ended)
        begun.span.end(ended)

    def failed(self, request: Request, error: BaseException) -> None:
        begun = self._begun.pop(request.request_id, None)
        if begun is None:
            return
        if isinstance(error, Exception):
            kind = type(error).__qualname__
            begun.span.set_attribute("error.type", kind)
            begun.span.set_status(self._trace.StatusCode.ERROR, kind)
        else:
            begun.span.set_attribute("gen_ai.response.finish_reasons", (GIVEN_UP,))
        begun.span.end(begun.now())

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


def _facts(engine: Engine) -> Attributes:
    """Return the attributes that all requests of an engine have in common."""
    provider = engine.name.removesuffix("-server")
    told: Attributes = {
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": engine.model_name,
        "gen_ai.response.model": engine.model_name,
        "gen_ai.output.type": "text",
        "openinference.span.kind": "LLM",
        "llm.provider": provider,
        "llm.model_name": engine.model_name,
    }
    if "://" in engine.address:
        url = urlsplit(engine.address)
        told["server.address"] = url.hostname or ""
        told["server.port"] = url.port or (443 if url.scheme == "https" else 80)
    return told


def _operation(prepared: PreparedPrompt) -> str:
    source = prepared.source.prompt if isinstance(prepared.source, TurnPrompt) else prepared.source
    return "text_completion" if isinstance(source, str | BlendPrompt) else "chat"


def _asked(request: Request, operation: str) -> Attributes:
    """Return the attributes of a request that are known when it begins."""
    sampling = {name: getattr(request.sampling, name) for name in SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    return {
        "gen_ai.operation.name": operation,
        **{f"gen_ai.request.{name}": value for name, value in sampling.items()},
        **({"gen_ai.request.stream": True} if request.streamed else {}),
        "llm.invocation_parameters": json.dumps(sampling),
        f"{OURS}request_id": request.request_id,
    }


def _answered(answer: Generation) -> Attributes:
    """Return the attributes of an answer that the conventions name."""
    report, generated = answer.report, len(answer.token_ids)
    first = report.seconds.time_to_first_token
    return {
        "gen_ai.response.id": report.request_id,
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.usage.cache_read.input_tokens": report.reused_tokens,
        "gen_ai.response.time_to_first_chunk": first,
        "gen_ai.server.time_to_first_token": first,
        "llm.token_count.prompt": report.prompt_tokens,
        "llm.token_count.completion": generated,
        "llm.token_count.total": report.prompt_tokens + generated,
        "llm.token_count.prompt_details.cache_read": report.reused_tokens,
    }


def _blended(report: BlendReport) -> Attributes:
    """Return our own attributes of a report."""
    told: dict[str, Any] = {name: getattr(report, name) for name in TOLD}
    for name in REASONS:
        reason = getattr(report, name)
        if reason is not None:
            told[f"{name}_code"] = reason.code.value
    hits, misses = count_chunks(report.chunks)
    told |= {"chunk_hits": hits.total(), "chunk_misses": misses.total()}
    told |= {f"chunk_hits_by_tier.{tier.replace(' ', '_')}": count for tier, count in hits.items()}
    told |= {f"chunk_misses_by_reason.{code}": count for code, count in misses.items()}
    for name, value in asdict(report.seconds).items():
        if isinstance(value, Mapping):
            told |= {f"seconds.{name}.{tier}": float(part) for tier, part in value.items()}
        elif value:
            told[f"seconds.{name}"] = float(value)
    return {f"{OURS}{name}": value for name, value in told.items()}
