"""A real server, scraped by a real Prometheus, sends its spans to a receiver that is neither's."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from prometheus_client import start_http_server

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
from tests.examples.test_dashboard import FOLDER, SOURCES, asked, queries
from tests.local_servers import HOST, Server, prometheus_server
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


@pytest.fixture
def prometheus(engine: VLLMEngine, tmp_path: Path) -> Iterator[Server]:
    """A Prometheus with the committed configuration, but for addresses and times."""
    exposed, _ = start_http_server(0, registry=EngineMetrics(engine).registry)
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = "1s"
    ports = (engine.address.rpartition(":")[2], exposed.server_port)
    for job, port in zip(config["scrape_configs"], ports, strict=True):
        job["static_configs"] = [{"targets": [f"{HOST}:{port}"]}]
    written = tmp_path / "prometheus.yml"
    written.write_text(yaml.safe_dump(config), encoding="utf-8")
    with prometheus_server(written, tmp_path / "data") as running:
        yield running
    exposed.shutdown()


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


def found(server: Server, query: str) -> list[float]:
    """Return the values of the series that a query returns now, without those that are NaN."""
    url = f"http://{HOST}:{server.port}/api/v1/query?query={quote(query)}"
    with urlopen(url) as answer:
        told: dict[str, Any] = json.load(answer)
    values = [float(one["value"][1]) for one in told["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def test_every_panel_has_series_of_a_real_server(prometheus: Server, engine: VLLMEngine) -> None:
    missing = {
        (name, query)
        for name, template in queries()
        for query in (asked(template, source) for source in SOURCES)
    }
    deadline, turn = time.monotonic() + PATIENCE, 0
    while missing and time.monotonic() < deadline:
        prompt = PROMPTS[turn % len(PROMPTS)]
        engine.precompute(documents(prompt), progress=False)
        if turn % 2:
            engine.release()  # so that the store lacks what the server knows
        engine.generate(text(prompt), ANSWER)
        missing = {one for one in missing if not found(prometheus, one[1])}
        turn += 1
        time.sleep(0.5)
    assert sorted(missing) == []
    hits = f"sum(increase({SOURCES[0]}chunk_hits_total[5m]))"
    assert found(prometheus, hits)[0] > 0
