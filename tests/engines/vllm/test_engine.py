"""VLLMEngine as an Engine: index, ask, stream, cancel, many at once, one store for both engines."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    Document,
    Generation,
    SamplingParams,
    open_engine,
)
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.errors import ConfigError, ModelLoadError, PromptError
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.test_exactness import DOCUMENTS, SHORT, logprobs, retrieved
from tests.models import words

REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0)


def test_index_ask_and_evict(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    again = engine.precompute(DOCUMENTS, progress=False)
    assert (again.computed, again.skipped) == (0, 4)

    prompt = retrieved().text
    answer = engine.generate(prompt, SHORT, config=REUSE)
    report = answer.report
    assert report.blended
    assert [c.document_id for c in report.chunks] == ["b", "a", "a"]
    assert report.reused_tokens == 91 + 60 + 150
    assert report.prompt_tokens == report.reused_tokens + report.computed_tokens
    assert len(answer.token_ids) == SHORT.max_tokens
    assert answer.finish_reason == "length"

    assert engine.evict_document("b") == 2
    report = engine.generate(f"{prompt} w9", SHORT, config=REUSE).report
    assert [c.document_id for c in report.chunks] == ["a", "a"]


def test_an_edited_document_drops_what_it_no_longer_holds(engine: VLLMEngine) -> None:
    first = Document("edited", (words(40, 61), words(50, 62), words(30, 63)))
    second = Document("edited", (words(40, 61), words(45, 64)))
    assert engine.precompute([first], progress=False).computed == 3
    report = engine.precompute([second], progress=False)
    assert (report.computed, report.skipped) == (1, 1)
    assert engine.registry.document("edited") == tuple(second.to_chunks())


def test_a_stream_joins_to_the_answer(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    deltas = list(engine.stream(retrieved(), SHORT))
    answer = deltas[-1].generation
    assert answer is not None
    assert "".join(delta.text for delta in deltas) == answer.text
    assert answer.token_ids == engine.generate(retrieved(), SHORT).token_ids


def test_one_token_brings_its_report(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    prompt = BlendPrompt.of(*DOCUMENTS[0].to_chunks()[:1], words(17, 77))
    report = engine.generate(prompt, SamplingParams(max_tokens=1), config=REUSE).report
    assert [chunk.hit for chunk in report.chunks] == [True]


def test_a_cancelled_request_ends_and_the_engine_goes_on(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    long = SamplingParams(max_tokens=1500)
    stream = engine.stream(retrieved(), long)
    next(stream)
    stream.close()

    cancel = Event()
    cancel.set()
    assert engine.generate(retrieved(), long, cancel=cancel).finish_reason == "cancelled"

    async def give_up() -> None:
        task = asyncio.create_task(engine.agenerate(retrieved(), long))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert len(engine.generate(retrieved(), SHORT).token_ids) == SHORT.max_tokens


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
        prompts.append(BlendPrompt.of(*parts, words(20 + index, 200 + index)))
    return prompts


def same_tokens(answers: list[Generation], others: list[Generation]) -> bool:
    return [a.token_ids for a in answers] == [b.token_ids for b in others]


def test_many_at_once_answer_as_one_after_another(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    prompts = mixed_prompts(40)
    alone = [engine.generate(prompt, SHORT) for prompt in prompts]
    assert same_tokens(alone, engine.generate_batch(prompts, SHORT))

    async def ask() -> list[Generation]:
        return await asyncio.gather(*(engine.agenerate(prompt, SHORT) for prompt in prompts))

    assert same_tokens(alone, asyncio.run(ask()))


def test_synchronous_blending_gives_the_same_answers(
    engine: VLLMEngine, open_vllm: EngineFactory
) -> None:
    waiting = open_vllm(asynchronous=False)
    for one in (engine, waiting):
        one.precompute(DOCUMENTS, progress=False)
    prompts = mixed_prompts(8)
    assert same_tokens(
        engine.generate_batch(prompts, SHORT), waiting.generate_batch(prompts, SHORT)
    )
    report = waiting.generate(prompts[1], SHORT).report
    assert report.blended


def test_a_tiny_cache_preempts_and_answers_stay_right(open_vllm: EngineFactory) -> None:
    engine = open_vllm(num_gpu_blocks_override=24, max_num_seqs=8)
    engine.precompute(DOCUMENTS, progress=False)
    prompts = mixed_prompts(12)
    long = SamplingParams(max_tokens=120)
    alone = [engine.generate(prompt, long) for prompt in prompts]
    assert same_tokens(alone, engine.generate_batch(prompts, long))


def test_a_request_without_its_salt_is_not_blended(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    asked = engine._ask(retrieved(), SHORT, REUSE, ())
    unsalted = replace(asked.request, salt="any")
    reference = replace(asked.request, salt="other", order=None)
    assert logprobs(engine, unsalted) == logprobs(engine, reference)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_model_that_cannot_be_blended_answers_by_ordinary_prefill(
    open_vllm: EngineFactory, asynchronous: bool
) -> None:
    engine = open_vllm("gpt2", asynchronous=asynchronous)
    report = engine.precompute(DOCUMENTS, progress=False)
    assert report.computed == 0
    assert sum(report.refused.values()) == 4
    answer = engine.generate(retrieved(), SHORT)
    assert answer.token_ids == engine.generate_full(retrieved(), SHORT).token_ids
    assert not answer.report.blended
    assert "decoder layers" in str(answer.report.reason)


def test_bad_input_is_one_line(engine: VLLMEngine, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="context window"):
        engine.generate(words(3000, 1), SHORT)
    with pytest.raises(PromptError, match="empty"):
        engine.generate("", SHORT)
    with pytest.raises(ModelLoadError, match="no-such-model") as caught:
        open_engine("vllm", model=str(tmp_path / "no-such-model"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="name or a folder"):
        open_engine("vllm", model=object())  # type: ignore[arg-type]
