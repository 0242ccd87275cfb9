"""The guard in vLLM: a worker compares while nothing else is to be done, as the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag import (
    BlendConfig,
    Chunk,
    Document,
    GuardConfig,
    GuardReport,
    SamplingParams,
    TransformersEngine,
)
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.job import BlendJob
from cacheblend_rag.engines.vllm.protocol.result import CompareResult
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prefill.comparing import Compared
from cacheblend_rag.prefill.lead_in import LeadInId
from tests.engines.vllm.inprocess import InProcessEngine
from tests.kv.samples import until
from tests.models import make_tokenizer, prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.2, cost_model=False)
GREEDY = SamplingParams.greedy(max_tokens=5, ignore_eos=True)
EVERY = GuardConfig(sample_share=1.0, answer_tokens=4)
DOCUMENT = Document("d", tuple(words(30 + i, i) for i in range(4)), separator=" w77 ")
ALONE = [Chunk(words(40, seed)) for seed in (11, 12)]


@pytest.fixture
def blend_config() -> BlendConfig:
    return CONFIG


@pytest.fixture
def core(llama: InProcessEngine) -> InProcessEngine:
    llama.precompute([DOCUMENT, *ALONE], progress=False)
    return llama


def compared(engine: Engine, seed: int, *chunks: Chunk) -> GuardReport:
    """What an engine's guard says of one prompt."""
    engine.guard = EVERY
    answer = engine.generate(prompt_of(words(5, seed), *chunks, words(6, seed)), GREEDY)
    assert answer.report.blended
    assert until(lambda: not engine.guard_report().waiting, 60)
    report, engine.guard = engine.guard_report(), None
    return report


@pytest.mark.parametrize(
    "chunks", [ALONE, DOCUMENT.to_chunks()[2:3]], ids=["alone", "in its document"]
)
def test_a_worker_finds_what_the_embedded_engine_finds(
    core: InProcessEngine, model_folder: Callable[[str], Path], chunks: list[Chunk]
) -> None:
    other = TransformersEngine(
        model_folder("llama"), tokenizer=make_tokenizer(), config=CONFIG, dtype="float32"
    )
    other.precompute([DOCUMENT, *ALONE], progress=False)
    here, there = compared(core, 50, *chunks), compared(other, 50, *chunks)
    assert here.compared == there.compared == 1
    assert here.divergence == pytest.approx(there.divergence, rel=1e-2)
    assert here.prefill_divergence == pytest.approx(there.prefill_divergence, rel=1e-2)
    assert (here.prefill_divergence > 1e-3) == (len(chunks) == 1)
    assert here.divergence > 1e-3
    other.close()


def test_it_is_compared_when_nobody_decodes(core: InProcessEngine) -> None:
    ended: list[str] = []
    prepared = core.prepare(prompt_of("w5", *ALONE, "w9"))
    sent = core._sent(core._request(prepared, GREEDY)).request.job
    assert sent is not None

    async def compare() -> None:
        found = await core._jobs.compare(sent.chunks, Compared(prepared.token_ids, (5, 6)), CONFIG)
        assert isinstance(found, CompareResult)
        ended.append("compared")

    async def ask() -> None:
        prompt = tuple(core.tokenize(words(20, 61)))
        request = VLLMRequest(prompt, ResolvedSampling(max_tokens=60, ignore_eos=True))
        async for _ in core.transport.send(request, stream=True):
            pass
        ended.append("answered")

    async def both() -> None:
        await asyncio.gather(compare(), ask())

    core.transport.run(both())
    assert ended == ["answered", "compared"]


@pytest.mark.parametrize(
    "changes",
    [{"answer": []}, {"tokens": []}, {"answer": [-1]}, {"reference": ["x"]}, {"answer": None}],
)
def test_malformed_comparisons_are_refused(changes: dict[str, object]) -> None:
    job = BlendJob("compare", LeadInId("none", "", 0), tokens=(5,) * 9, answer=(3,), idle=True)
    params = job.to_params()
    params["cacheblend"]["chunks"] = [{"start": 1, "end": 5}]
    assert BlendJob.from_params(params, 2).idle
    params["cacheblend"] |= changes
    with pytest.raises(ConfigError):
        BlendJob.from_params(params, 2)


def test_tokens_beyond_the_model_are_refused() -> None:
    job = BlendJob("compare", LeadInId("none", "", 0), tokens=(5,) * 9, answer=(3,))
    job.check(longest=10, vocabulary=6)
    for longest, vocabulary in [(9, 6), (10, 5)]:
        with pytest.raises(ConfigError, match="exceed"):
            job.check(longest=longest, vocabulary=vocabulary)
