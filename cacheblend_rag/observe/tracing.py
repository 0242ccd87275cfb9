"""OpenTelemetry spans: one for each request, with the seconds of each phase.

Names are those of the conventions for generative AI, which are still in development (``gen_ai.*``,
as in ``SEMANTIC_CONVENTIONS``), and of OpenInference (``openinference.*``, ``llm.*``); what neither
has is under ``cacheblend.*``. No text of a prompt or an answer is in a span.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cacheblend_rag.engines.after_answer import RequestWatcher
from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.report import REASONS, BlendReport, count_chunks
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

SEMANTIC_CONVENTIONS = "1.44.0"
"""The version of OpenTelemetry's semantic conventions that the names are taken from."""
SCOPE = "cacheblend_rag"
OURS = "cacheblend."
GIVEN_UP = "cancelled"
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
        self._spans: dict[str, Span] = {}

    def begins(self, request: Request) -> Request:
        # A request that begins again goes on with its span.
        span = self._spans.get(request.request_id) or self._begin(request)
        self._spans[request.request_id] = span
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._trace.set_span_in_context(span))
        return replace(request, headers={**request.headers, **headers})

    def _begin(self, request: Request) -> Span:
        operation = _operation(request.prepared)
        return self._tracer.start_span(
            f"{operation} {self._facts['gen_ai.request.model']}",
            kind=self._kind,
            attributes={**self._facts, **_asked(request, operation)},
        )

    def __call__(self, request: Request, answer: Generation) -> None:
        if (span := self._spans.pop(request.request_id, None)) is not None:
            span.set_attributes({**_answered(answer), **_blended(answer.report)})
            span.end()

    def failed(self, request: Request, error: BaseException) -> None:
        if (span := self._spans.pop(request.request_id, None)) is None:
            return
        if isinstance(error, Exception):
            kind = type(error).__qualname__
            span.set_attribute("error.type", kind)
            span.set_status(self._trace.StatusCode.ERROR, kind)
        else:
            span.set_attribute("gen_ai.response.finish_reasons", (GIVEN_UP,))
        span.end()


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
