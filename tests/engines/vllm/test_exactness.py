"""vLLM's own prefill is the reference: ratio 1 equals it bit for bit, on every model family."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Any

import pytest

from cacheblend_rag import BlendPrompt, Document, SamplingParams, TransformersEngine
from cacheblend_rag.engines.vllm.client import VLLMRequest
from cacheblend_rag.engines.vllm.engine import VLLMEngine, _sampling
from tests.engines.vllm.conftest import EngineFactory
from tests.models import FAMILIES, make_tokenizer, words

DOCUMENTS = (
    Document("a", (words(60, 1), words(150, 2)), separator=" w77 "),
    Document("b", (words(203, 3), words(91, 4)), separator=" w77 "),
)
SHORT = SamplingParams(max_tokens=6)


def retrieved(count: int = 3) -> BlendPrompt:
    """A prompt over chunks out of order: one document whole, the other without its beginning."""
    first, second = (document.to_chunks() for document in DOCUMENTS)
    chosen = (second[1], *first)[:count]
    parts: list[Any] = [words(9, 50)]
    for chunk in chosen:
        parts += [chunk, " w7 "]
    return BlendPrompt.of(*parts, words(23, 9))


def logprobs(engine: VLLMEngine, request: VLLMRequest) -> list[float]:
    """Greedy tokens' log-probabilities, as vLLM itself returns them."""
    sampling = _sampling(request)
    sampling.logprobs, sampling.ignore_eos = 1, True

    async def run() -> list[float]:
        found: list[float] = []
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
        async for step in engine._vllm.generate(prompt, sampling, uuid.uuid4().hex):
            out = step.outputs[0]
            found += [
                top[token].logprob for top, token in zip(out.logprobs, out.token_ids, strict=True)
            ]
        return found

    return asyncio.run_coroutine_threadsafe(run(), engine._loop).result()


def compared(engine: VLLMEngine, prompt: BlendPrompt, ratio: float) -> tuple[float, Any]:
    """Largest difference of log-probabilities to ordinary prefill, and the blended generation."""
    config = engine.config.with_changes(recompute_ratio=ratio)
    asked = engine._ask(prompt, SHORT, config, ())
    plain = VLLMRequest(asked.request.token_ids, SHORT, uuid.uuid4().hex)
    pairs = zip(logprobs(engine, asked.request), logprobs(engine, plain), strict=True)
    return max(abs(a - b) for a, b in pairs), engine.generate(prompt, SHORT, config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_1_equals_ordinary_prefill(open_vllm: EngineFactory, family: str) -> None:
    engine = open_vllm(family)
    report = engine.precompute(DOCUMENTS, progress=False)
    assert (report.computed, report.refused) == (4, {})
    prompt = retrieved()
    difference, _ = compared(engine, prompt, 1.0)
    assert difference == 0.0
    difference, reused = compared(engine, prompt, 0.0)
    assert difference > 1e-4, "plain reuse of moved chunks is never exact"
    assert math.isfinite(difference)
    assert [chunk.hit for chunk in reused.report.chunks] == [True] * 3
    engine.close()


@pytest.mark.parametrize("selector", ["hkvd", "prior", "random", "chunk_head", "question"])
def test_both_engines_choose_the_same_rows_and_tokens(
    engine: VLLMEngine, model_folder, selector: str
) -> None:
    config = engine.config.with_changes(selector=selector, recompute_ratio=0.3)
    embedded = TransformersEngine(model_folder("llama"), tokenizer=make_tokenizer(), config=config)
    engine.precompute(DOCUMENTS, progress=False)
    embedded.precompute(DOCUMENTS, progress=False)
    prompt = retrieved()
    here = engine.generate(prompt, SHORT, config=config)
    there = embedded.generate(prompt, SHORT, config=config)
    assert here.token_ids == there.token_ids
    assert here.report.recomputed_tokens > 0
    assert here.report.recomputed_tokens == there.report.recomputed_tokens
    assert [c.recomputed for c in here.report.chunks] == [c.recomputed for c in there.report.chunks]


def test_a_plain_request_is_not_served_from_blended_blocks(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    prompt = retrieved()
    asked = engine._ask(prompt, SHORT, engine.config.with_changes(recompute_ratio=0.0), ())
    fresh = logprobs(engine, VLLMRequest(asked.request.token_ids, SHORT, "fresh"))
    blended = logprobs(engine, asked.request)
    after = logprobs(engine, VLLMRequest(asked.request.token_ids, SHORT, "after"))
    assert blended != fresh
    assert after == fresh


def test_missing_chunks_are_computed_and_reported(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    unknown = Document("new", (words(80, 31),)).to_chunks()[0]
    engine.register([unknown])
    stored = DOCUMENTS[0].to_chunks()[0]
    prompt = BlendPrompt.of(unknown, " w7 ", stored, " w7 ", words(20, 9))
    difference, generation = compared(engine, prompt, 1.0)
    assert difference == 0.0
    assert [(c.hit, c.reason) for c in generation.report.chunks] == [
        (False, "not stored"),
        (True, None),
    ]
