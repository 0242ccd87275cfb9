"""Sends OpenTelemetry spans of a few requests, on SmolLM2, to whatever listens at a URL.

Run it with ``python examples/observability/traced.py http://127.0.0.1:6006/v1/traces``.
"""

import sys
from contextlib import closing

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from cacheblend_rag import Chunk, SamplingParams, TransformersEngine, trace_requests
from cacheblend_rag.demo.passages import load_passages

INSTRUCTION = "Answer from the passages.\n\n"


def main(url: str) -> None:
    """Ask three questions, each in a span of the application's own."""
    provider = TracerProvider(resource=Resource.create({"service.name": "rag-application"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    tracer = provider.get_tracer("application")

    sample = load_passages()
    texts = [passage.text for passage in sample.passages[:6]]
    engine = TransformersEngine("smollm2", instruction=INSTRUCTION)
    with closing(engine):
        engine.precompute(map(Chunk, texts), progress=False)
        trace_requests(engine, provider)
        for question in sample.questions[:3]:
            passages = "\n\n".join(texts)
            prompt = f"{INSTRUCTION}{passages}\n\nQuestion: {question.question}\nAnswer:"
            with tracer.start_as_current_span("question") as span:
                report = engine.generate(prompt, SamplingParams.greedy(max_tokens=8)).report
            trace_id = f"{span.get_span_context().trace_id:032x}"
            print(f"trace {trace_id}: {report.reused_tokens} of {report.prompt_tokens} reused")
    provider.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
