"""A real server has the dashboard's metrics, and sends its spans to a receiver of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from urllib.request import urlopen

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

from cacheblend_rag import (
    BlendConfig,
    EngineMetrics,
    GuardConfig,
    SamplingParams,
    open_engine,
    trace_requests,
)
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from tests.engines.vllm.conftest import SERVER_FLAGS
from tests.examples.test_dashboard import SOURCES, named
from tests.local_servers import HOST
from tests.otlp_receiver import OTLPReceiver, receiving
from tests.toy import TOY, generate_prompts
from tests.toy.corpus import HEAD, documents, text
from tests.vllm_server import running_server

CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.15, cost_model=False)
ANSWER = SamplingParams(max_tokens=4)
PROMPTS = tuple(generate_prompts("adjacent", 8, 11))
PATIENCE = 240.0
VLLM_SPAN = "llm_request"
"""The name of vLLM's own span of a request."""


class OwnIds(IdGenerator):
    """Ids that no seed repeats: vLLM seeds the generator of the usual ones, in any process."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1


@pytest.fixture(scope="module")
def receiver() -> Iterator[OTLPReceiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def engine(receiver: OTLPReceiver) -> Iterator[VLLMEngine]:
    """An application's engine on a server of its own, which sends spans, too."""
    flags = (*SERVER_FLAGS, "--max-model-len", "4096", "--otlp-traces-endpoint", receiver.url)
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with running_server(TOY, served_name="toy", flags=flags, environment=environment) as server:
        guard = GuardConfig(sample_share=1.0)
        engine = open_engine(server.url, model=TOY, config=CONFIG, instruction=HEAD, guard=guard)
        assert isinstance(engine, VLLMEngine)
        with closing(engine):
            yield engine


def test_a_servers_spans_are_below_the_requests(engine: VLLMEngine, receiver: OTLPReceiver) -> None:
    provider = TracerProvider(id_generator=OwnIds())
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(receiver.url)))
    traced = engine.sibling(lead_in="document")
    trace_requests(traced, provider)
    with provider.get_tracer("app").start_as_current_span("ask"):
        traced.generate(text(PROMPTS[0]), ANSWER)
        streamed = list(traced.stream(text(PROMPTS[0]), ANSWER))
    provider.shutdown()
    traced.close()
    [ask] = receiver.named("ask")
    requests = receiver.children(ask)
    assert [one.name for one in requests] == ["text_completion toy"] * 2
    assert {one.kind for one in requests} == {Span.SPAN_KIND_CLIENT}
    assert len(streamed) > 1
    for request in requests:
        assert f"http://{HOST}:{request.attributes['server.port']}" == engine.address
        theirs = receiver.wait_for(VLLM_SPAN, PATIENCE, below=request)
        assert theirs.trace_id == ask.trace_id
        tokens = theirs.attributes["gen_ai.usage.prompt_tokens"]
        assert tokens == request.attributes["gen_ai.usage.input_tokens"]


def test_every_metric_of_the_dashboard_is_a_real_servers(engine: VLLMEngine) -> None:
    missing, metrics = {*named(SOURCES[0]), *named(SOURCES[1])}, EngineMetrics(engine)
    deadline, turn = time.monotonic() + PATIENCE, 0
    while missing and time.monotonic() < deadline:
        prompt = PROMPTS[turn % len(PROMPTS)]
        engine.precompute(documents(prompt), progress=False)
        if turn % 2:
            engine.release()  # so that the store lacks what the server knows
        engine.generate(text(prompt), ANSWER)
        with urlopen(f"{engine.address}/metrics") as answer:  # noqa: S310
            told = f"{answer.read().decode()}{metrics.text()}"
        missing = {name for name in missing if f"\n{name}" not in told}
        turn += 1
    assert sorted(missing) == []
