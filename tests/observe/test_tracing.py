"""Spans are received over OTLP by a server that knows nothing of this package."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas

from cacheblend_rag import (
    BlendConfig,
    Chunk,
    Generation,
    SamplingParams,
    TransformersEngine,
    trace_requests,
)
from cacheblend_rag.engines.answer import Request
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.observe import tracing
from cacheblend_rag.report import PREFILL_PHASES
from cacheblend_rag.text.chat import Message
from tests.engines.contract import WAYS
from tests.engines.toy_engine import ToyEngine
from tests.models import make_model, make_tokenizer, words
from tests.otlp_receiver import OTLPReceiver, receiving

SHORT = SamplingParams(max_tokens=6)
STORED, MISSED = Chunk(words(60, 1)), Chunk(words(30, 2))
PROMPT = f"{words(5, 3)} {STORED.text} w7 {MISSED.text} {words(9, 4)}"
REQUEST = "text_completion hash"


@pytest.fixture
def receiver() -> Iterator[OTLPReceiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def provider(receiver: OTLPReceiver) -> Iterator[TracerProvider]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(receiver.url)))
    yield provider
    provider.shutdown()


@pytest.fixture
def toy(provider: TracerProvider) -> Iterator[ToyEngine]:
    engine = ToyEngine(make_tokenizer(), config=BlendConfig(min_tokens=0), lead_in="none")
    engine.precompute([STORED], progress=False)
    engine.register([MISSED])
    trace_requests(engine, provider)
    yield engine
    engine.close()


def test_a_request_of_the_embedded_engine_is_a_span_with_the_seconds_of_its_phases(
    receiver: OTLPReceiver, provider: TracerProvider
) -> None:
    engine = TransformersEngine(
        make_model("llama"),
        tokenizer=make_tokenizer(),
        config=BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.25),
    )
    engine.precompute([STORED], progress=False)
    engine.register([MISSED])
    trace_requests(engine, provider)
    with provider.get_tracer("app").start_as_current_span("ask") as asking:
        answer = engine.generate(PROMPT, SHORT)
    engine.close()
    [ask] = receiver.named("ask")
    [span] = receiver.children(ask)
    assert span.trace_id == f"{asking.get_span_context().trace_id:032x}"
    assert span.kind == Span.SPAN_KIND_INTERNAL
    assert ask.start <= span.start + 0.01
    assert span.end <= ask.end

    report, told = answer.report, span.attributes
    assert report.blended
    assert told["gen_ai.operation.name"] == "text_completion"
    assert span.name == f"text_completion {told['gen_ai.request.model']}"
    assert told["gen_ai.usage.cache_read.input_tokens"] == report.reused_tokens > 0
    assert told["llm.token_count.prompt_details.cache_read"] == report.reused_tokens
    assert told["gen_ai.usage.input_tokens"] == report.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == told["llm.token_count.completion"] == 6
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["openinference.span.kind"] == "LLM"
    first = report.seconds.time_to_first_token
    assert told["gen_ai.server.time_to_first_token"] == pytest.approx(first)
    assert told["cacheblend.recompute_ratio"] == 0.25
    assert (told["cacheblend.selector"], told["cacheblend.request_id"]) == (
        report.selector,
        report.request_id,
    )
    assert told["cacheblend.chunk_hits_by_tier.host"] == told["cacheblend.chunk_hits"] == 1
    assert told["cacheblend.chunk_misses_by_reason.not_stored"] == 1

    for phase in PREFILL_PHASES:
        seconds = getattr(report.seconds, phase)
        assert told.get(f"cacheblend.seconds.{phase}", 0) == pytest.approx(seconds)
    assert told["cacheblend.seconds.recompute"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask_belongs_to_the_callers_trace(
    receiver: OTLPReceiver, provider: TracerProvider, toy: ToyEngine, way: str
) -> None:
    with provider.get_tracer("app").start_as_current_span("ask"):
        answer = WAYS[way](toy, PROMPT)
    [ask] = receiver.named("ask")
    [span] = receiver.children(ask)
    assert (span.name, span.trace_id) == (REQUEST, ask.trace_id)
    assert span.attributes["cacheblend.request_id"] == answer.report.request_id
    assert span.attributes.get("gen_ai.request.stream", False) == ("stream" in way)
    if way == "generate_full":
        assert span.attributes["cacheblend.reason_code"] == "full_prefill_asked"


def test_requests_at_the_same_time_keep_to_their_own_traces(
    receiver: OTLPReceiver, provider: TracerProvider, toy: ToyEngine
) -> None:
    tracer = provider.get_tracer("app")

    async def ask(number: int) -> Generation:
        with tracer.start_as_current_span(f"ask {number}"):
            return await toy.agenerate(PROMPT, SHORT)

    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*map(ask, range(5)))

    for number, answer in enumerate(asyncio.run(all_of_them())):
        [asked] = receiver.named(f"ask {number}")
        [span] = receiver.children(asked)
        assert span.attributes["cacheblend.request_id"] == answer.report.request_id
    with tracer.start_as_current_span("batch"):
        toy.generate_batch([PROMPT, words(9, 8)], SHORT)
    assert len(receiver.children(receiver.named("batch")[0])) == 2


def test_a_failed_request_has_an_error_and_one_that_is_left_has_none(
    receiver: OTLPReceiver, toy: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Any = toy.stream(PROMPT, SamplingParams(max_tokens=2000))
    next(stream)
    stream.close()
    cancel = Event()
    cancel.set()
    toy.generate(PROMPT, SHORT, cancel=cancel)

    def broken(request: Request) -> Any:
        raise RuntimeError(request.prepared.text)

    monkeypatch.setattr(toy, "_prefilled", broken)
    with pytest.raises(RuntimeError):
        toy.generate(PROMPT, SHORT)
    left, cancelled, failed = receiver.named(REQUEST)
    for span in (left, cancelled):
        assert span.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
        assert span.status == Status.STATUS_CODE_UNSET
    assert failed.status == Status.STATUS_CODE_ERROR
    assert failed.attributes["error.type"] == "RuntimeError"
    assert_no_text(receiver)


def assert_no_text(receiver: OTLPReceiver) -> None:
    sent = b"".join(receiver.bodies)
    for text in (STORED.text[:40], MISSED.text[:40], PROMPT[:20], PROMPT[-20:], "w300"):
        assert text.encode() not in sent


def test_names_are_those_of_the_conventions(receiver: OTLPReceiver, toy: ToyEngine) -> None:
    toy.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0.5, top_k=7, seed=3))
    [span] = receiver.named(REQUEST)
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    sent = {name for name in span.attributes if name.startswith("gen_ai.")}
    # A metric of the conventions, not an attribute; tools that show traces look for it.
    assert sent - known == {"gen_ai.server.time_to_first_token"}
    assert span.schema == f"https://opentelemetry.io/schemas/{tracing.SEMANTIC_CONVENTIONS}"
    assert span.schema in {one.value for one in Schemas}
    assert json.loads(span.attributes["llm.invocation_parameters"]) == {
        "max_tokens": 6, "temperature": 0.5, "top_p": 1.0, "top_k": 7, "seed": 3,
    }  # fmt: skip


def test_the_global_provider_is_the_default_and_chat_messages_are_a_chat(
    receiver: OTLPReceiver, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = ToyEngine(tokenizer)
    trace_requests(engine)
    messages: list[Message] = [{"role": "user", "content": words(9, 5)}]
    engine.generate(messages, SHORT)
    engine.close()
    [span] = receiver.named("chat hash")
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert {span.scope for span in receiver.spans} == {tracing.SCOPE}


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    engine = ToyEngine(make_tokenizer())
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[tracing\]"):
        trace_requests(engine)
    engine.close()
