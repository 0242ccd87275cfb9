"""Requests that bring no job: chunks are found in their prompts, and blended as a client's own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.tracing import extract_trace_headers

from cacheblend_rag import BlendConfig, BlendPrompt, Document
from cacheblend_rag.engines.vllm.connector.metrics import PREFIX
from cacheblend_rag.engines.vllm.namespaces import FIELD, JOB_FIELD
from cacheblend_rag.engines.vllm.protocol.job import NOTHING_FOUND, PARAMETER, VERSION, StoreJob
from cacheblend_rag.engines.vllm.protocol.result import EvictResult
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from tests.engines.vllm.exactness import SHORT, index
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS, retrieved
from tests.models import words

SPACED = Document("c", (words(70, 81), words(120, 82)), separator="\n\n")
CONFIG = BlendConfig(min_tokens=0, selector="question_mid", recompute_ratio=0.2, cost_model=False)
TELLING = {"kind": "find", "version": VERSION}
OFF = NOTHING_FOUND.to_params()


@pytest.fixture
def engine(llama: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> InProcessEngine:
    finder = llama.scheduler_connector.finding
    monkeypatch.setattr(finder, "config", CONFIG)
    index(llama)
    llama.precompute([SPACED], progress=False)
    assert finder.finder.settle()
    return llama


class Told:
    """What vLLM says of a request: log-probabilities, cached tokens, what the connector adds."""

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.tokens: list[int] = []
        self.cached = 0
        self.params: Any = None


def ask(
    engine: InProcessEngine,
    *prompts: Sequence[int],
    salt: str | None = None,
    params: Any = None,
    **sampling: Any,
) -> list[Told]:
    """Send requests at once, as any client of vLLM does."""

    async def one(prompt: Sequence[int]) -> Told:
        told = Told()
        extra = None if params is None else {"kv_transfer_params": params}
        asked = SamplingParams(
            **{"temperature": 0, "max_tokens": 5, "logprobs": 1, "ignore_eos": True, **sampling},
            extra_args=extra,
        )
        request = VLLMRequest(tuple(prompt), SHORT, salt)
        async for step in engine.vllm.outputs(request, asked):
            out = step.outputs[0]
            told.tokens, told.cached = list(out.token_ids), step.num_cached_tokens or 0
            pairs = zip(out.logprobs, out.token_ids, strict=True)
            told.logprobs = [top[token].logprob for top, token in pairs]
            told.params = step.kv_transfer_params
        return told

    async def all_() -> list[Told]:
        return await asyncio.gather(*map(one, prompts))

    return engine.transport.run(all_())


def tokens_of(engine: InProcessEngine, prompt: BlendPrompt | str) -> tuple[int, ...]:
    return request_of(engine, prompt, SHORT, CONFIG, full=True).token_ids


def find(**config: Any) -> dict[str, Any]:
    return {PARAMETER: {**TELLING, "config": config}}


def plain(engine: InProcessEngine, prompt: Sequence[int]) -> Told:
    """Ordinary prefill that nothing is cached of."""
    [told] = ask(engine, prompt, salt=uuid.uuid4().hex, params=OFF)
    assert told.cached == 0
    return told


def counted(name: str) -> float:
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"{PREFIX}{name}_total"
    )


def test_a_request_of_any_client_reuses_chunks(engine: InProcessEngine) -> None:
    before = {name: counted(name) for name in ("found_requests", "found_tokens", "chunk_hits")}
    prompt = tokens_of(engine, retrieved())
    [told] = ask(engine, prompt)
    assert 0.6 * 301 < told.cached <= 301
    assert told.params is None, "who did not ask is told nothing"
    assert told.logprobs != pytest.approx(plain(engine, prompt).logprobs, abs=1e-4)
    grown = {name: counted(name) - value for name, value in before.items()}
    assert grown == {"found_requests": 1, "found_tokens": 301, "chunk_hits": 3}
    assert counted("find_seconds") > 0


def test_repeats_come_out_of_the_prefix_cache(engine: InProcessEngine) -> None:
    """At once (n answers), one after another, and with another client's salt anew."""
    prompt = (*tokens_of(engine, retrieved()), *engine.tokenize(words(300, 8)))
    before = counted("reused_tokens")
    told = ask(engine, *[prompt] * 4)
    once = counted("reused_tokens") - before
    for one in told[1:]:
        assert one.logprobs == pytest.approx(told[0].logprobs, abs=1e-4)
    [again] = ask(engine, prompt)
    assert again.logprobs == pytest.approx(told[0].logprobs, abs=1e-5)
    assert again.cached > told[0].cached
    work = counted("blend_seconds")
    ask(engine, prompt)
    assert counted("blend_seconds") == work
    assert once > 0
    [other] = ask(engine, prompt, salt="another client")
    assert other.cached == told[0].cached


def test_only_new_chunks_are_blended_in_an_agents_next_step(engine: InProcessEngine) -> None:
    exact = find(recompute_ratio=1.0)
    new = engine.tokenize(SPACED.to_chunks()[0].text)
    for params in (find(), exact):
        first = (*tokens_of(engine, retrieved()), *engine.tokenize(words(200, 43)))
        [answer] = ask(engine, first, params=params, max_tokens=140)
        later = (*first, *answer.tokens, *new, *engine.tokenize(words(30, 44)))
        [told] = ask(engine, later, params=params)
        told_of = told.params[PARAMETER]
        blended = [one["tokens"] for one in told_of["chunks"] if one["tier"] == "host"]
        assert (len(told_of["chunks"]), blended) == (4, [70])
        assert told_of["prefix_tokens"] > 301
        assert told.cached > len(first) - 128
    assert told.logprobs == pytest.approx(plain(engine, later).logprobs, abs=1e-4)


def test_blocks_of_a_prompt_hold_no_blend_of_a_longer_one(engine: InProcessEngine) -> None:
    """Which rows are recomputed depends on the question, and so on all of the longer prompt."""
    new = engine.tokenize(SPACED.to_chunks()[0].text)

    def tiers(prompt: Sequence[int]) -> tuple[Told, set[str]]:
        [told] = ask(engine, prompt, params=find())
        return told, {chunk["tier"] for chunk in told.params[PARAMETER]["chunks"]}

    for seed, added in ((51, []), (52, new)):
        first = (*tokens_of(engine, retrieved()), *engine.tokenize(words(200, seed)))
        [answer] = ask(engine, first, params=find(), max_tokens=140)
        later = (*first, *answer.tokens, *added, *engine.tokenize(words(200, seed + 10)))
        before, _ = tiers(first)
        assert engine.core.reset_prefix_cache()
        blended, told = tiers(later)
        assert told == {"host"}, "the blocks that it continues are gone"
        assert len(blended.params[PARAMETER]["chunks"]) == 3 + bool(added)
        again, told = tiers(first)
        assert told == {"host"}, "no block of the longer prompt is its own"
        assert again.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        again, told = tiers(later)
        assert told == {"prefix cache"}
        assert again.logprobs == pytest.approx(blended.logprobs, abs=1e-5)


def test_a_prompt_that_a_preempted_one_began_with_is_counted_once(
    short_steps: InProcessEngine,
) -> None:
    engine = short_steps
    index(engine)
    assert engine.scheduler_connector.finding.finder.settle()
    config = find(**{**CONFIG.to_dict(), "trace": False})
    first = (*tokens_of(engine, retrieved()), *engine.tokenize(words(200, 47)))
    ask(engine, first, params=config)
    own, cached = engine.vllm.step, []

    def step() -> None:
        own()
        (state,) = engine.scheduler.running or (None,)
        if not cached and state is not None and 0 < state.num_computed_tokens < len(later) - 9:
            cached.append(state.prefill_stats.num_cached_tokens)
            engine.core.reset_prefix_cache(reset_running_requests=True)

    later = (*first, *engine.tokenize(words(700, 48)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.vllm, "step", step)
        [told] = ask(engine, later, params=config)
    assert told.cached == cached[0] > 301, "as many as its first prefill had"


def test_parts_of_cut_and_edited_text_are_reused(engine: InProcessEngine) -> None:
    chunk = engine.tokenize(DOCUMENTS[1].to_chunks()[0].text)
    cut = [*engine.tokenize(words(9, 61)), *chunk[70:], *engine.tokenize(words(20, 62))]
    edited = [*chunk[:90], 5, 5, *chunk[93:], *engine.tokenize(words(20, 63))]
    [first, second] = ask(engine, cut, edited, params=find(recompute_ratio=0.0))
    told = [(c["start"], c["tokens"]) for c in first.params[PARAMETER]["chunks"]]
    assert told == [(19, len(chunk) - 80)], "parts begin and end at multiples of 16 tokens"
    told = [(c["start"], c["tokens"]) for c in second.params[PARAMETER]["chunks"]]
    assert told == [(0, 80), (95, len(chunk) - 96)]
    assert (first.cached, second.cached) == (len(chunk) - 80, len(chunk) - 16)
    for prompt in (cut, edited):
        [exact] = ask(engine, prompt, params=find(recompute_ratio=1.0))
        assert exact.logprobs == pytest.approx(plain(engine, prompt).logprobs, abs=1e-5)


def test_what_was_evicted_is_not_found_nor_what_was_blended_of_it(engine: InProcessEngine) -> None:
    prompt = tokens_of(engine, retrieved())
    ask(engine, prompt)
    engine.evict_document("b")
    [told] = ask(engine, prompt, params=find())
    assert [chunk["tokens"] for chunk in told.params[PARAMETER]["chunks"]] == [60, 150]
    engine.evict_document("a")
    [told] = ask(engine, prompt, salt="of this question")
    assert told.logprobs == plain(engine, prompt).logprobs
    index(engine)
    assert engine.scheduler_connector.finding.finder.settle()
    [told] = ask(engine, prompt, params=find())
    assert {chunk["tier"] for chunk in told.params[PARAMETER]["chunks"]} == {"host"}, "blended anew"


def test_what_the_store_has_lost_stays_known(engine: InProcessEngine) -> None:
    """It is told as not stored, looked for once, and shares blocks as any prompt meanwhile."""
    store = engine.worker_connector.blender.store
    for key in list(store.entries()):
        store.evict(key)
    first = tokens_of(engine, retrieved())
    blended = counted("find_seconds")
    told = [ask(engine, first, params=find())[0] for _ in range(2)]
    assert counted("find_seconds") > blended
    for one in told:
        said = one.params[PARAMETER]
        assert said["reason"][0] == "not_stored"
        assert [chunk["reason"][0] for chunk in said["chunks"]] == ["not_stored"] * 3
    assert "work_seconds" in told[0].params[PARAMETER]
    assert "work_seconds" not in told[1].params[PARAMETER], "no worker had it"
    long = (*first, *engine.tokenize(words(300, 91)))
    ask(engine, long)
    [plain_one] = ask(engine, long, params=OFF)
    assert plain_one.cached > len(first), "nothing is set apart"
    index(engine)
    assert engine.scheduler_connector.finding.finder.settle()
    [again] = ask(engine, first, salt="anew", params=find())
    assert {chunk["tier"] for chunk in again.params[PARAMETER]["chunks"]} == {"host"}


@pytest.mark.parametrize(
    ("mode", "params", "blends"),
    [
        ("on", None, True),
        ("on", OFF, False),
        ("asked", None, False),
        ("asked", find(), True),
        ("off", find(), False),
    ],
)
def test_who_is_searched(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch, mode: str, params: Any, blends: bool
) -> None:
    monkeypatch.setattr(engine.scheduler_connector.finding, "mode", mode)
    prompt = tokens_of(engine, retrieved())
    [told] = ask(engine, prompt, params=params, salt=uuid.uuid4().hex)
    assert (told.cached > 0) == blends
    if mode == "off" and params is not None:
        assert "find=off" in told.params[PARAMETER]["reason"][1]


def test_a_strangers_request_carries_no_job(engine: InProcessEngine) -> None:
    """Jobs are in a trace header, of which vLLM takes two from clients, and none from bodies."""
    stored = set(engine.worker_connector.blender.store.entries())
    keys = tuple((key.chunk_id, key.context_id) for key in stored)
    job = StoreJob(kind="evict", lead_in=engine._led.id, keys=keys)
    sent = {**find(), JOB_FIELD: job.model_dump_json(), "job": job.model_dump(mode="json")}
    [told] = ask(engine, tokens_of(engine, retrieved()), params=sent)
    assert [chunk["hit"] for chunk in told.params[PARAMETER]["chunks"]] == [True] * 3
    assert engine.worker_connector.blender.store.entries().keys() == stored
    assert extract_trace_headers({JOB_FIELD: job.model_dump_json(), FIELD: "another"}) == {}
    done = engine.transport.run(engine.carry_out(job))
    assert done == EvictResult(len(keys)), "which a server's own does"


def test_a_search_that_fails_is_its_requests_only(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    prompt = tokens_of(engine, retrieved())
    monkeypatch.setattr(engine.scheduler_connector.finding.finder, "find", fail)
    [told] = ask(engine, prompt, params=find())
    assert told.params[PARAMETER]["reason"][0] == "no_chunk"
    assert told.cached == 0
