"""What goes wrong between VLLMEngine and a server, against a server that can do nothing else.

No vLLM is needed: answers are canned.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from traceback import TracebackException
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, Chunk, Profile, SamplingParams, open_engine
from cacheblend_rag.engines.after_answer import RequestWatcher
from cacheblend_rag.engines.answer import Request
from cacheblend_rag.engines.model_files import vllm_generation_values
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.connection import VLLMServer
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.protocol.result import NO_CONNECTOR
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
)
from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.settings.base import Secret
from tests.engines.vllm.opening import vllm_server
from tests.local_servers import free_port
from tests.models import QWEN_SAMPLING, make_tokenizer, words
from tests.toy import TOY

UNKNOWN = 2
"""What the tests' tokenizer makes of each word that it does not know."""
KEY = "sesame"
MODEL = {"id": "tiny", "root": "org/tiny", "max_model_len": 512, "parent": None}
STATUS = {"active": True, "identity": "0123456789abcdef", "namespace": namespace_id("default")}
CHUNK = Chunk(words(40, 1), "report")
PROMPT = f"{CHUNK.text} {words(9, 2)}"
FOUR = SamplingParams(max_tokens=4)
HIT = {"chunk_id": "0" * 32, "start": 0, "tokens": 40, "hit": True, "tier": "host"}


class CannedServer:
    """Answers ``/v1/models``, completions and jobs; ``asked`` notes the kinds of wishes and jobs.

    said: what requests and jobs bring. fail: a status for those that ask for no status.
    breaks: how many streams break off after their first token. names, traces: headers.
    """

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [MODEL]
        self.status: dict[str, Any] | None = dict(STATUS)
        self.said: dict[str, Any] | None = {"chunks": [HIT], "selector": "none", "ratio": 0.0}
        self.reports: dict[str, Any] | None = None
        self.fail: list[int] = []
        self.breaks = 0
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.names: list[str | None] = []
        self.traces: list[str | None] = []
        self.url = ""

    def result(self, body: dict[str, Any]) -> dict[str, Any] | None:
        told = (body.get("kv_transfer_params") or {}).get("cacheblend", body)
        self.asked.append(told["kind"])
        return {"status": self.status, "report": self.reports}.get(told["kind"], self.said)


@contextmanager
def listening(canned: CannedServer) -> Iterator[CannedServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Authorization"] != f"Bearer {KEY}":
                return self.reply(401, {"error": f"Unauthorized: {self.headers['Authorization']}"})
            return self.reply(200, {"object": "list", "data": canned.models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            canned.bodies.append(body)
            canned.names.append(self.headers["X-Request-Id"])
            canned.traces.append(self.headers["traceparent"])
            if isinstance(body.get("prompt"), str):
                count = len(body["prompt"].split())
                return self.reply(200, completion(prompt_token_ids=[UNKNOWN] * count))
            result = canned.result(body)
            if canned.asked[-1] != "status" and canned.fail:
                return self.reply(canned.fail.pop(0), {"error": {"message": "no\nroom"}})
            if self.path == "/v1/cacheblend/jobs":
                return self.reply(404 if result is None else 200, result)
            params = None if result is None else {"cacheblend": result}
            if body.get("stream"):
                return self.stream()
            return self.reply(200, completion(kv_transfer_params=params))

        def reply(self, status: int, plain: Any) -> None:
            body = json.dumps(plain).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", "10000")
            self.end_headers()
            for text, ended in ((" w5", None), (" w6", "length")):
                ids = [int(text[2:])]
                choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": ended}
                event = {"id": "x", "object": "text_completion", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                if canned.breaks:
                    canned.breaks -= 1
                    break
            else:
                self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def log_message(self, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    canned.url = f"http://127.0.0.1:{server.server_port}"
    yield canned
    server.shutdown()
    server.server_close()


def completion(
    prompt_token_ids: list[int] | None = None, kv_transfer_params: Any = None
) -> dict[str, Any]:
    choice = {"index": 0, "text": "w5 w6", "token_ids": [5, 6], "finish_reason": "length"}
    return {
        "id": "x",
        "object": "text_completion",
        "choices": [{**choice, "prompt_token_ids": prompt_token_ids}],
        "kv_transfer_params": kv_transfer_params,
    }


@pytest.fixture
def canned() -> Iterator[CannedServer]:
    with listening(CannedServer()) as server:
        yield server


Open = Callable[..., VLLMEngine]


@pytest.fixture
def connect(canned: CannedServer) -> Iterator[Open]:
    opened: list[VLLMEngine] = []

    def make(**options: Any) -> VLLMEngine:
        given = {"tokenizer": make_tokenizer(), "api_key": KEY, "max_retries": 0}
        config = BlendConfig(min_tokens=0)
        engine = vllm_server(
            canned.url, **{"config": config, "lead_in": "none", **given, **options}
        )
        engine.register([CHUNK])
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    assert KEY not in str(error)
    return str(error)


def test_a_requests_headers_are_sent_and_replace_none_of_ours(
    canned: CannedServer, connect: Open
) -> None:
    sent = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "X-Request-Id": "other"}

    class Sending(RequestWatcher):
        def begins(self, request: Request) -> Request:
            return replace(request, headers=sent)

    engine = connect()
    assert set(canned.traces) == {None}, "asking for the status belongs to no request"
    canned.traces.clear()
    canned.names.clear()
    engine.after_answer(Sending())
    answer = engine.generate(PROMPT, FOUR)
    joined = list(engine.stream(PROMPT, FOUR))
    assert len(joined) > 1
    assert canned.asked == ["status", "find", "find", "report"]
    assert canned.traces == [sent["traceparent"], sent["traceparent"], None]
    assert canned.names[0] == answer.report.request_id


def test_a_servers_seconds_fit_within_the_time_to_the_first_token(
    canned: CannedServer, connect: Open
) -> None:
    engine = connect()
    tiers = {"host": 1e5, "disk": 3e5}
    canned.said = {"chunks": [HIT], "seconds": {"load": 4e5, "lay_in": 1e5}, "load_by_tier": tiers}
    seconds = engine.generate(PROMPT, FOUR).report.seconds
    assert 0 < seconds.time_to_first_token < 60
    assert seconds.load == pytest.approx(4 * seconds.lay_in)
    assert seconds.load_by_tier["disk"] == pytest.approx(0.75 * seconds.load)
    assert seconds.load_by_tier["host"] == pytest.approx(0.25 * seconds.load)


@pytest.mark.parametrize(("told", "held"), [(16, 16), (10**9, 20), (-5, 0)])
def test_a_prefix_ends_before_the_first_chunk_whatever_a_server_says(
    canned: CannedServer, connect: Open, told: int, held: int
) -> None:
    engine = connect()
    prompt = f"{words(20, 3)} {PROMPT}"
    why = ["not_stored", "no chunk of the prompt is stored"]
    for said, chunk_tokens in (
        ({"chunks": [{**HIT, "start": 20}]}, 40),
        ({"reason": why, "compute_share": 0.75}, 0),
    ):
        canned.said = {**said, "prefix_tokens": told}
        report = engine.generate(prompt, FOUR).report
        assert report.prefix_tokens == held
        assert report.reused_tokens == held + chunk_tokens
        assert report.computed_tokens == report.prompt_tokens - report.reused_tokens
    assert report.compute_share == 0.75


def test_a_late_report_is_asked_for(canned: CannedServer, connect: Open) -> None:
    engine = connect()
    known = {**HIT, "chunk_id": engine.key(CHUNK).chunk_id}
    canned.said, canned.reports = {"late": True}, {"chunks": [known]}
    report = engine.generate(PROMPT, FOUR).report
    assert [(one.hit, one.document_id) for one in report.chunks] == [(True, "report")]
    wish, asked = canned.bodies[-2]["kv_transfer_params"]["cacheblend"], canned.bodies[-1]
    assert wish["report_id"] == asked["report_id"] != ""
    canned.reports = {"chunks": [HIT]}
    [found] = engine.generate(PROMPT, FOUR).report.chunks
    assert (found.hit, found.document_id) == (True, None), "whose it is, the client cannot say"
    canned.reports = {"chunks": [{**HIT, "start": 40, "tokens": 8}]}
    missed, found = engine.generate(PROMPT, FOUR).report.chunks
    assert (missed.reason, missed.document_id) == ("not stored", "report")
    assert (found.hit, found.document_id) == (True, None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, NO_CONNECTOR),
        (
            {"reason": ["unsupported_request", "LoRA requests are not blended"]},
            "LoRA requests are not blended",
        ),
        ({"error": ["failed", "blending failed: KeyError"]}, "blending failed: KeyError"),
        ({"chunks": [{**HIT, "hit": False, "tier": None}]}, "no chunk of the prompt is stored"),
    ],
)
def test_a_prefill_that_was_not_blended_says_why(
    canned: CannedServer, connect: Open, said: Any, reason: str
) -> None:
    engine = connect()
    canned.said = canned.reports = said
    streamed = list(engine.stream(PROMPT, FOUR))[-1].generation
    assert streamed is not None
    for report in (engine.generate(PROMPT, FOUR).report, streamed.report):
        assert (report.blended, report.reason) == (False, reason)


def test_without_the_connector_nothing_is_computed_ahead(
    canned: CannedServer, connect: Open
) -> None:
    canned.status = None
    engine = connect()
    report = engine.precompute([CHUNK, "w5 w6"], progress=False)
    assert report.refused == {NO_CONNECTOR: 2}
    assert set(canned.asked) == {"status"}
    canned.status = dict(STATUS)
    canned.said = {"computed": 1, "computed_tokens": 40}
    assert engine.precompute([CHUNK], progress=False).computed == 1


def test_nothing_is_left_to_the_servers_defaults(canned: CannedServer, connect: Open) -> None:
    connect().generate(PROMPT, SamplingParams(max_tokens=4, stop=("w9",), top_k=3, seed=1))
    body = canned.bodies[-1]
    told = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")}
    assert told == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "seed": 1,
        "stop": ["w9"],
    }
    assert body["presence_penalty"] == body["frequency_penalty"] == 0
    assert body["prompt"] == list(make_tokenizer().encode(PROMPT))
    assert body["cache_salt"] is None, "it shares what stands before its chunks with any request"


def test_the_model_own_sampling_is_what_the_connector_says(
    canned: CannedServer, connect: Open
) -> None:
    own = {name: value for name, value in QWEN_SAMPLING.items() if name != "do_sample"}
    canned.status = {**STATUS, "sampling": own}
    answer = connect().generate(PROMPT, SamplingParams(max_tokens=4, top_p=0.5))
    told = {name: canned.bodies[-1][name] for name in ("temperature", "top_p", "top_k")}
    assert told == {"temperature": 0.7, "top_p": 0.5, "top_k": 20}
    assert canned.bodies[-1]["repetition_penalty"] == answer.sampling.repetition_penalty == 1.1
    canned.status = {**STATUS, "sampling": {**own, "top_p": 7}}
    assert "top_p=7 must be" in str(connect().blend_refusal)


class VLLMsModelConfig:
    """The part of vLLM's ModelConfig that says how answers are drawn."""

    def __init__(self, generation_config: str = "auto", **overrides: Any) -> None:
        self.generation_config, self.override_generation_config = generation_config, overrides

    def try_get_generation_config(self) -> dict[str, Any]:
        return dict(QWEN_SAMPLING)


def test_vllms_own_options_are_laid_over_the_models() -> None:
    def read(*arguments: str, **overrides: Any) -> ResolvedSampling:
        values = vllm_generation_values(VLLMsModelConfig(*arguments, **overrides))
        return ResolvedSampling.of_model(values)

    assert read() == ResolvedSampling.of_model(QWEN_SAMPLING)
    assert read("vllm") == ResolvedSampling.of_model({})
    assert read("vllm", temperature=0.5) == ResolvedSampling(temperature=0.5, top_k=50)
    changed = {**QWEN_SAMPLING, "do_sample": False, "temperature": 0, "top_k": 9}
    assert read(temperature=0, top_k=9) == ResolvedSampling.of_model(changed)


def test_a_servers_profile_is_its_clients_but_for_what_they_set(
    canned: CannedServer, connect: Open
) -> None:
    served = Profile(
        name="served", blend={"selector": "prior", "recompute_ratio": 0.2}, lead_in={"kind": "bos"}
    )
    canned.status = {**STATUS, "profile": json.dumps(served.to_dict())}
    engine = connect(config=BlendConfig(recompute_ratio=0.5), lead_in=None)
    assert (engine.config.ratio, engine.config.selector) == (0.5, "prior")
    assert engine.lead_in.kind == "bos"
    own = connect(config=None)
    assert (own.config.ratio, own.lead_in.kind) == (0.2, "none")


def test_the_key_is_in_no_traceback_and_no_pickle(canned: CannedServer) -> None:
    canned.fail = [500] * 9
    with pytest.raises(CacheBlendError) as raised:
        open_engine(canned.url, model=TOY, api_key=KEY)
    with pytest.raises(CacheBlendError) as unreachable:
        open_engine(f"http://127.0.0.1:{free_port()}", model=TOY, api_key=KEY)
    for caught in (raised, unreachable):
        told = TracebackException.from_exception(caught.value, capture_locals=True)
        shown = "".join(told.format())
        ours = shown[shown.index("factory.py") :]  # the test's own frame holds it
        assert KEY not in ours
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Secret(KEY))


@pytest.mark.parametrize("url", ["http://u:sesame@h", "http://sesame@h", "http://h/?k=sesame#x"])
def test_a_key_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="give its key as api_key=") as caught:
        open_engine(url, model=TOY)
    assert KEY not in one_line(caught.value)


@pytest.mark.parametrize(
    ("models", "error", "said"),
    [
        ([], EngineUnavailableError, "is not a vLLM server"),
        ([{"id": "gpt", "object": "model"}], EngineUnavailableError, "is not a vLLM server"),
        (
            [MODEL, {**MODEL, "id": "b", "root": "b"}],
            ConfigError,
            "is not served by .*, which has tiny, b",
        ),
    ],
)
def test_what_is_served_must_be_clear(
    canned: CannedServer,
    connect: Open,
    models: list[dict[str, Any]],
    error: type[CacheBlendError],
    said: str,
) -> None:
    canned.models = models
    with pytest.raises(error, match=said) as caught:
        connect(model="other")
    one_line(caught.value)


def test_a_model_is_found_by_its_name_or_source(canned: CannedServer, connect: Open) -> None:
    adapter = {**MODEL, "id": "adapter", "root": "lora", "parent": "tiny"}
    canned.models = [adapter, {**MODEL, "id": "b", "root": "org/b"}, MODEL]
    assert connect(model="org/tiny").model_name == "tiny"
    assert connect(model="b").model_name == "b"
    assert connect(model="/where/the/tokenizer/is/b").model_name == "b"
    canned.models = [adapter, MODEL, {**MODEL, "id": "alias"}]
    assert connect(model="elsewhere").model_name == "tiny"


def test_another_vocabulary_is_refused(connect: Open) -> None:
    with pytest.raises(
        ConfigError, match="the tokenizer here is not that of model 'tiny'"
    ) as caught:
        connect(tokenizer=None, model=TOY)
    one_line(caught.value)


def test_a_tokenizer_must_be_here(connect: Open, tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"give model= .* or tokenizer=") as caught:
        connect(tokenizer=None, model=str(tmp_path))
    one_line(caught.value)


def test_a_request_that_fails_is_one_line_and_an_overloaded_server_is_asked_again(
    canned: CannedServer, connect: Open
) -> None:
    canned.fail = [500]
    with pytest.raises(EngineUnavailableError, match="answers 500") as caught:
        connect().generate(PROMPT, FOUR)
    one_line(caught.value)
    canned.fail = [400]
    with pytest.raises(EngineUnavailableError, match="answers 400"):
        connect(max_retries=3).generate(PROMPT, FOUR)
    for status in (502, 503, 504):
        canned.fail = [status]
        engine = connect(max_retries=1)
        sent = engine.transport.counts.sent
        assert engine.generate(PROMPT, FOUR).report.blended
        counts = engine.transport.counts
        assert (counts.sent - sent, counts.retried) == (1, 1)


def test_a_stream_that_breaks_off_is_an_error(canned: CannedServer, connect: Open) -> None:
    canned.breaks = 1
    engine = connect(max_retries=1)
    stream = engine.stream(PROMPT, FOUR)
    assert next(stream).text == " w5"
    with pytest.raises(EngineUnavailableError, match=r"broke off .*: ask again") as caught:
        list(stream)
    assert canned.url in one_line(caught.value)
    assert engine.transport.counts.retried == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "must be like http://host:8000"),
        ({"url": "http://me:sesame@localhost:8000"}, "give its key as api_key="),
    ],
)
def test_options_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        VLLMServer(**{"url": "http://localhost:8000", **options})
    one_line(caught.value)


def test_a_slow_server_is_given_up(canned: CannedServer, connect: Open) -> None:
    engine = connect(timeout_seconds=0.2)
    slow = threading.Event()
    result = canned.result

    def late(body: dict[str, Any]) -> Any:
        slow.wait(5)
        return result(body)

    canned.result = late  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailableError, match=r"within timeout_seconds=0\.2"):
        engine.generate(PROMPT, FOUR)
    slow.set()


def test_openai_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[vllm-server\]"):
        open_engine("http://127.0.0.1:9", model=TOY)


def test_vllm_need_not_be_installed() -> None:
    modules = ", ".join(f"cacheblend_rag.engines.vllm.{name}" for name in ("connection", "engine"))
    code = f"import sys, {modules}; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
