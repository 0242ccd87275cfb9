"""Engines over a vLLM of their own and on a server: the contract of engines, and beyond it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from cacheblend_rag import (
    BlendPrompt,
    Chunk,
    Conversation,
    Generation,
    SamplingParams,
    TransformersEngine,
)
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import InProcessVLLM
from cacheblend_rag.engines.vllm.job_client import carrier, params_of_last
from cacheblend_rag.engines.vllm.protocol import BlendJob, PrefetchResult, result_of
from cacheblend_rag.engines.vllm.serve import RunningServer, running_server
from cacheblend_rag.engines.vllm.versions import memory_share
from tests.engines import contract
from tests.engines.vllm.conftest import SERVER_FLAGS
from tests.engines.vllm.opening import request_of, vllm_in_process, vllm_server
from tests.engines.vllm.test_exactness import DOCUMENTS, SHORT, retrieved
from tests.kv.samples import until
from tests.models import make_tokenizer, prompt_of, words

CONFIG = contract.CONFIG.with_changes(cost_model=False)
"""In a server's process nothing keeps noise from deciding, once it has timed enough prompts."""
REUSE = CONFIG.with_changes(recompute_ratio=0.0)
BOS = 1
WINDOW = 2048


@pytest.fixture(scope="module")
def in_process(model_folder: Callable[[str], Path]) -> Iterator[VLLMEngine]:
    engine = vllm_in_process(
        model_folder("llama"),
        config=contract.CONFIG,
        dtype="float32",
        enforce_eager=True,
        max_model_len=WINDOW,
    )
    yield engine
    if engine.is_open:
        engine.close()


@pytest.fixture(scope="module")
def server(model_folder: Callable[[str], Path]) -> Iterator[RunningServer]:
    flags = (*SERVER_FLAGS, "--max-model-len", str(WINDOW))
    with running_server(model_folder("llama"), flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def on_server(server: RunningServer, model_folder: Callable[[str], Path]) -> Iterator[VLLMEngine]:
    engine = vllm_server(server.url, model=model_folder("llama"), config=contract.CONFIG)
    yield engine
    engine.close()


class TestServer(contract.EngineContract):
    tells_what_it_stores = False

    @pytest.fixture
    def engine(self, on_server: VLLMEngine) -> VLLMEngine:
        return on_server

    def at_work(self, engine: VLLMEngine) -> int:
        # vLLM sets its gauges at the end of a step; a request that is aborted between two steps is
        # counted until the next one, so there has to be one.
        step = json.dumps({"prompt": [0], "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{engine.address}/v1/completions", step, headers)) as answer:  # noqa: S310
            answer.read()
        with urlopen(f"{engine.address}/metrics") as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return int(sum(float(line.split()[-1]) for line in running))


# Beyond the contract


@pytest.fixture(params=["in process", "server"])
def engine(
    request: pytest.FixtureRequest, model_folder: Callable[[str], Path]
) -> Iterator[VLLMEngine]:
    if request.param == "in process":
        yield request.getfixturevalue("in_process")
        return
    url = request.getfixturevalue("server").url
    engine = vllm_server(url, model=model_folder("llama"), config=CONFIG)
    yield engine
    engine.close()


@pytest.fixture
def filled(engine: VLLMEngine) -> VLLMEngine:
    engine.precompute(DOCUMENTS, progress=False)
    return engine


def same_tokens(answers: list[Generation], others: list[Generation]) -> bool:
    return [a.token_ids for a in answers] == [b.token_ids for b in others]


def test_it_says_what_it_is(engine: VLLMEngine) -> None:
    assert engine.name in {"vllm", "vllm-server"}
    assert (engine.model_name, engine.context_window) == ("llama", WINDOW)
    assert engine.status.active
    assert len(engine.fingerprint) == 64
    assert not engine.has_chat_template
    assert engine.tokenize("w5 w6") == (5, 6)


def test_index_ask_and_evict(filled: VLLMEngine) -> None:
    again = filled.precompute(DOCUMENTS, progress=False)
    assert (again.computed, again.skipped) == (0, 4)
    filled.prefetch(["a", DOCUMENTS[1].to_chunks()[0]])
    chunks = [chunk for document in DOCUMENTS for chunk in document.to_chunks()]
    named = tuple((key.chunk_id, key.context_id) for key in map(filled.key, chunks))
    asked = request_of(filled, retrieved(), SHORT, REUSE).job
    assert asked is not None
    order = carrier(BlendJob("prefetch", asked.lead_in, keys=named))
    params = filled.transport.run(params_of_last(filled.transport, order))
    assert isinstance(result_of(params), PrefetchResult)

    prompt = retrieved().text
    answer = filled.generate(prompt, SHORT, config=REUSE)
    report = answer.report
    assert report.blended
    assert report.engine == filled.name
    assert [c.document_id for c in report.chunks] == ["b", "a", "a"]
    assert report.reused_tokens == 91 + 60 + 150
    assert report.prompt_tokens == report.reused_tokens + report.computed_tokens
    assert len(answer.token_ids) == SHORT.max_tokens
    assert answer.finish_reason == "length"

    assert filled.evict_document("b") == 2
    report = filled.generate(f"{prompt} w9", SHORT, config=REUSE).report
    assert [c.document_id for c in report.chunks] == ["a", "a"]


def test_of_chunks_with_other_tokens_at_their_edges_the_rest_is_reused(
    filled: VLLMEngine, model_folder: Callable[[str], Path]
) -> None:
    """A word that touches a passage changes its first or last token."""
    filled.precompute(DOCUMENTS, progress=False)
    embedded = TransformersEngine(
        model_folder("llama"), tokenizer=make_tokenizer(), config=CONFIG, dtype="float32"
    )
    embedded.precompute(DOCUMENTS, progress=False)
    first, second = (document.to_chunks()[0] for document in DOCUMENTS)
    prompt = BlendPrompt.of(words(9, 61), first, f"{words(7, 62)} ", second, words(23, 63))
    whole = tuple(make_tokenizer().encode(prompt.text, add_special_tokens=False))
    for ratio in (0.0, 0.3, 1.0):
        config = CONFIG.with_changes(recompute_ratio=ratio)
        here = filled.generate(prompt, SHORT, config=config)
        there = embedded.generate(prompt, SHORT, config=config)
        assert here.token_ids == there.token_ids
        assert [(c.hit, c.edge_tokens) for c in here.report.chunks] == [(True, 2), (True, 1)]
        assert here.report.reused_tokens == there.report.reused_tokens
        assert here.report.prompt_tokens == len(whole)
    assert filled.generate_full(prompt, SHORT).token_ids == here.token_ids


def test_a_passage_holds_no_control_token(filled: VLLMEngine) -> None:
    passage = Chunk(f"{words(40, 60)} <bos> {words(40, 61)}")
    assert filled.precompute([passage], progress=False).computed == 1
    prompt = prompt_of("w7 <bos>", passage, words(9, 62))
    sent = request_of(filled, prompt, SHORT, CONFIG).token_ids
    assert [token for token in sent if token == BOS] == [BOS], "the text's own"
    assert [chunk.hit for chunk in filled.generate(prompt, SHORT).report.chunks] == [True]


def test_sampling_is_the_requests_own(filled: VLLMEngine) -> None:
    drawn = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, top_k=50, seed=3)
    first, second = (filled.generate(retrieved(), drawn) for _ in range(2))
    assert first.token_ids == second.token_ids
    other = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, top_k=50, seed=4)
    assert filled.generate(retrieved(), other).token_ids != first.token_ids
    apart = SamplingParams(max_tokens=12, repetition_penalty=50.0)
    ids = filled.generate(retrieved(), apart).token_ids
    assert len(set(ids)) == len(ids)


def mixed_prompts(count: int) -> list[BlendPrompt]:
    """Plain ones, blended ones, and some with a chunk that is known but not stored."""
    draw = random.Random(5)
    chunks = [chunk for document in DOCUMENTS for chunk in document.to_chunks()]
    missing = Chunk(words(70, 99))
    prompts = []
    for index in range(count):
        chosen = [] if index % 4 == 0 else draw.sample(chunks, draw.randrange(1, 4))
        if index % 5 == 0:
            chosen.append(missing)
        parts = [part for chunk in chosen for part in (chunk, " w7 ")]
        prompts.append(prompt_of(*parts, words(20 + index, 200 + index)))
    return prompts


def test_many_at_once_answer_as_one_after_another(filled: VLLMEngine) -> None:
    prompts = mixed_prompts(32)
    alone = [filled.generate(prompt, SHORT) for prompt in prompts]
    assert same_tokens(alone, filled.generate_batch(prompts, SHORT))

    async def ask() -> list[Generation]:
        return await asyncio.gather(*(filled.agenerate(prompt, SHORT) for prompt in prompts))

    assert same_tokens(alone, asyncio.run(ask()))

    async def last(prompt: BlendPrompt) -> Generation:
        [*_, end] = [delta async for delta in filled.astream(prompt, SHORT)]
        assert end.generation is not None
        return end.generation

    async def stream_all() -> list[Generation]:
        return await asyncio.gather(*map(last, prompts))

    assert same_tokens(alone, asyncio.run(stream_all()))


def test_a_conversation_reuses_its_turns(filled: VLLMEngine) -> None:
    chunks = [chunk for document in DOCUMENTS for chunk in document.to_chunks()]
    greedy = SamplingParams.greedy(max_tokens=16)
    conversation = Conversation(filled, instruction=words(30, 900), sampling=greedy, config=REUSE)
    for turn in range(3):
        conversation.ask(words(24, 100 + turn), chunks[turn : turn + 1])
        assert until(lambda: not any(one.is_pending for one in conversation.kv._turns), 120)
    assert conversation.last is not None
    assert conversation.last.turn_tokens >= 2 * (24 + 12)
    assert conversation.kv.nbytes > 0
    kept = len(conversation.kv.keys())
    assert conversation.forget() == kept >= 3


def test_vllm_in_process_leaves_memory_to_others(in_process: VLLMEngine) -> None:
    assert isinstance(in_process.transport, InProcessVLLM)
    config = in_process.transport.vllm.vllm_config
    assert config.cache_config.gpu_memory_utilization == memory_share()


class TestInProcess(contract.EngineContract):
    """Last of all: its own last test ends the vLLM in this process."""

    tells_what_it_stores = False

    @pytest.fixture
    def engine(self, in_process: VLLMEngine) -> VLLMEngine:
        return in_process

    def at_work(self, engine: VLLMEngine) -> int:
        assert isinstance(engine.transport, InProcessVLLM)
        return int(engine.transport.vllm.output_processor.get_num_unfinished_requests())
