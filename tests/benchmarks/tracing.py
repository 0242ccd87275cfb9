"""`python -m tests.benchmarks.tracing`: what spans cost a request.

Three engines over one model and one store are asked in turn: without tracing, with spans that are
sent over OTLP/HTTP to a receiver, and without tracing once more. The first and the last differ in
nothing, so what stands between them is what the method cannot tell apart. Every answer is one
token long; its time holds all that spans cost the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from cacheblend_rag import Chunk, Engine, Generation, RequestWatcher, trace_requests
from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.bench.workload import ONE_TOKEN
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.answer import Request
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.observe.tracing import _Tracing
from cacheblend_rag.settings import EMBEDDED, BlendConfig
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.warm_start import INSTRUCTION, QUESTION, SENTENCE
from tests.otlp_receiver import OTLPReceiver, receiving

OFF, ON, AGAIN = "without tracing", "with spans", "without tracing, again"
LEAD_IN = "instruction"
MADE = 200
"""How often the spans of one answer are made, to time that alone."""


@dataclass(frozen=True, kw_only=True)
class TracingPlan(Plan):
    """Time to an answer of one token, with spans and without."""

    model: str = option("smollm2", "Model name, folder or GGUF file.")
    chunks: int = option(11, "Chunks in the prompt.", least=1)
    sentences: int = option(15, "Sentences of a chunk, 24 tokens of SmolLM2 each.", least=1)
    ratio: float = option(0.15, "Recompute ratio.", least=0.0)
    repeat: int = option(20, "Timed runs each; medians are shown.", least=1)


class _Latest(RequestWatcher):
    """Keeps the latest request and its answer."""

    def __call__(self, request: Request, answer: Generation) -> None:
        self.request, self.answer = request, answer


def measure_tracing(plan: TracingPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return seconds to an answer, and of making its spans alone."""
    chunks = [Chunk(_text(plan, index)) for index in range(plan.chunks)]
    config = BlendConfig(recompute_ratio=plan.ratio, reuse_prefix=False)
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        provider = stack.enter_context(_sending(receiver))
        advance("opening the model")
        engine = open_engine(
            EMBEDDED, model=plan.model, config=config, lead_in=LEAD_IN, instruction=INSTRUCTION
        )
        stack.enter_context(closing(engine))
        advance("computing chunk KV")
        engine.precompute(chunks, progress=False)
        engines = {OFF: engine} | {name: engine.sibling(lead_in=LEAD_IN) for name in (ON, AGAIN)}
        latest = _Latest()
        trace_requests(engines[ON], provider)
        engines[ON].after_answer(latest)
        for one in (engines[ON], engines[AGAIN]):
            one.register(chunks)
        cases: dict[str, Case] = {
            name: partial(_seconds, one, chunks) for name, one in engines.items()
        }
        runs = run_in_turns(cases, plan.repeat, advance)
        advance("making spans alone")
        made = _making(_Tracing(engines[ON], provider), latest)
        provider.force_flush()
    report = latest.answer.report
    return {
        "model": plan.model,
        "prompt_tokens": report.prompt_tokens,
        "blended": report.blended,
        "repeat": plan.repeat,
        "off_seconds": median(runs[OFF]),
        "on_seconds": median(runs[ON]),
        "slowdown": _excess(runs[ON], runs[OFF]),
        "noise": _excess(runs[AGAIN], runs[OFF]),
        "making_seconds": made,
        "making_share": made / median(runs[OFF]),
        "received_spans": len(receiver.spans),
        "runs": runs,
    }


@contextmanager
def _sending(receiver: OTLPReceiver) -> Iterator[TracerProvider]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(receiver.url)))
    try:
        yield provider
    finally:
        provider.shutdown()


def _text(plan: TracingPlan, chunk: int) -> str:
    """Return the sentences of a chunk, which no other chunk has."""
    first = 1000 + chunk * plan.sentences
    return "".join(
        SENTENCE.format(year=year, number=chunk + 1, ships=year % 97)
        for year in range(first, first + plan.sentences)
    )


def _seconds(engine: Engine, chunks: list[Chunk], turn: int) -> float:
    prompt = BlendPrompt.of(INSTRUCTION, *chunks, f"{QUESTION} {turn}")
    began = time.perf_counter()
    engine.generate(prompt, ONE_TOKEN)
    return time.perf_counter() - began


def _making(tracing: _Tracing, latest: _Latest) -> float:
    """Return the median seconds that the spans of one answer take to be made."""
    taken = []
    for _ in range(MADE):
        began = time.perf_counter()
        tracing(tracing.begins(latest.request), latest.answer)
        taken.append(time.perf_counter() - began)
    return median(taken)


def _excess(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True)) - 1


app = benchmark_app(TracingPlan, measure_tracing, facts("what spans cost"))

if __name__ == "__main__":
    app()
