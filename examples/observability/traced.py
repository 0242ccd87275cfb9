"""Sends OpenTelemetry spans of a few requests, on the bundled model, to whatever listens at a URL.

Run it with ``python examples/observability/traced.py http://127.0.0.1:6006/v1/traces``.
"""

import sys
from contextlib import closing

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from cacheblend_rag import Chunk, SamplingParams, TransformersEngine, trace_requests
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.demo.corpus import INSTRUCTION, generate_collection


def main(url: str) -> None:
    """Ask three questions, each in a span of the application's own."""
    provider = TracerProvider(resource=Resource.create({"service.name": "rag-application"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    tracer = provider.get_tracer("application")

    collection, questions = generate_collection(documents=12, questions=3, seed=5)
    texts = [text for document in collection for text in document.chunks]
    engine = TransformersEngine(MODEL_FOLDER, instruction=f"{INSTRUCTION}\n\n")
    with closing(engine):
        engine.precompute(map(Chunk, texts), progress=False)
        trace_requests(engine, provider)
        for question in questions:
            passages = "\n\n".join(texts)
            prompt = f"{INSTRUCTION}\n\n{passages}\n\nQuestion: {question.question}\nAnswer:"
            with tracer.start_as_current_span("question") as span:
                report = engine.generate(prompt, SamplingParams.greedy(max_tokens=8)).report
            trace_id = f"{span.get_span_context().trace_id:032x}"
            print(f"trace {trace_id}: {report.reused_tokens} of {report.prompt_tokens} reused")
    provider.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
