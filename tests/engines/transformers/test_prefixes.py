"""What prompts begin with is reused exactly, and stored after answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_rag import (
    BlendPrompt,
    Chunk,
    Document,
    PreparedPrompt,
    SamplingParams,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.prefixes import BLOCK_TOKENS
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.prompt_pass import ALL_EXACT
from tests.engines.transformers.conftest import EngineFactory
from tests.engines.transformers.test_faults import on_disk
from tests.models import make_model, prompt_of, words

DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "bit flipped in the tensors": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}

CHUNKS = [Chunk(words(80, seed)) for seed in range(3)]
INSTRUCTION = words(150, 90)
QUESTIONS = [words(20, 91 + number) for number in range(8)]
BLOCKS = 2
"""Whole blocks in the instruction."""
REUSED = BLOCKS * BLOCK_TOKENS
GREEDY = SamplingParams.greedy(max_tokens=12)


def with_chunks(question: str) -> BlendPrompt:
    return prompt_of(INSTRUCTION, *CHUNKS, question)


def without(question: str) -> BlendPrompt:
    return prompt_of(INSTRUCTION, question)


def asked(engine: TransformersEngine, prompt: Any, **options: Any) -> Generation:
    """Answer, and wait until the prompt's prefix is stored."""
    answer = engine.generate(prompt, GREEDY, **options)
    engine.prefixes.drain()
    return answer


def anew(engine: TransformersEngine, prompt: Any) -> Generation:
    """Answer without anything of earlier prompts."""
    return engine.generate(prompt, GREEDY, config=engine.config.with_changes(reuse_prefix=False))


def blocks(engine: TransformersEngine) -> list[KVKey]:
    """Return what the store holds beside this engine's chunks."""
    return [key for key in engine.store.keys() if key.fingerprint != engine.fingerprint]  # noqa: SIM118


@contextmanager
def rows_of(model: PreTrainedModel) -> Iterator[list[int]]:
    """Count the rows that the model's first layer computes, decoding aside."""
    counted: list[int] = []

    def count(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[-2] > 1:
            counted.append(inputs[0].shape[-2])

    hook = model.model.layers[0].mlp.register_forward_pre_hook(count)
    try:
        yield counted
    finally:
        hook.remove()


def test_a_salt_keeps_prefixes_apart_and_chunks_together(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.3)
    engine.precompute(CHUNKS, progress=False)

    def salted(salt: str | None, question: str) -> PreparedPrompt:
        return replace(engine.prepare(with_chunks(question)), cache_salt=salt)

    told = [
        asked(engine, salted(salt, question)).report
        for salt, question in zip(("a", "b", None, "a", "b", None), QUESTIONS, strict=False)
    ]
    assert [report.prefix_tokens for report in told] == [0] * 3 + [REUSED] * 3
    assert all(chunk.hit for report in told for chunk in report.chunks)
    old = salted("c", QUESTIONS[6])
    engine.register([Chunk(words(30, 77))])  # it is prepared again, and keeps its salt
    assert asked(engine, old).report.prefix_tokens == 0
    assert asked(engine, salted("c", QUESTIONS[7])).report.prefix_tokens == REUSED


@pytest.mark.parametrize(
    ("family", "prompt"),
    [*((family, with_chunks) for family in ("llama", "gemma2", "qwen3-moe")), ("gemma3", without)],
)
def test_the_same_answers_come_from_fewer_rows(
    make_engine: EngineFactory, family: str, prompt: Any
) -> None:
    model = make_model(family)
    engine = make_engine(with_model=model, recompute_ratio=0.3)
    engine.precompute(CHUNKS, progress=False)
    asked(engine, prompt(QUESTIONS[0]))
    off = engine.config.with_changes(reuse_prefix=False)
    question = QUESTIONS[1]
    with rows_of(model) as before:
        alone = anew(engine, prompt(question))
    with rows_of(model) as after:
        again = asked(engine, prompt(question))
    assert again.token_ids == alone.token_ids
    one, other = alone.report, again.report
    assert (one.prefix_tokens, other.prefix_tokens) == (0, REUSED)
    assert other.reused_tokens == one.reused_tokens + REUSED
    assert other.computed_tokens == one.computed_tokens - REUSED
    assert other.recomputed_tokens == one.recomputed_tokens
    assert other.compute_share < one.compute_share
    assert sum(after) == sum(before) - REUSED
    torch.testing.assert_close(
        engine.score(prompt(question), [5, 6, 7]).log_probs,
        engine.score(prompt(question), [5, 6, 7], config=off).log_probs,
        rtol=0,
        atol=2e-4,
    )


KEPT = (150 + 3 * 80) // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens in the whole blocks up to the last chunk."""


def when_idle(engine: TransformersEngine, prompt: Any, **options: Any) -> Generation:
    """Answer by an engine with idle work, and wait until there is no more."""
    engine.fill_on_miss = True
    answer = asked(engine, prompt, **options)
    while engine._idle._thread is not None:
        time.sleep(0.01)
    return answer


def is_exact(answer: Generation, engine: TransformersEngine, prompt: Any) -> None:
    """Check that passages were reused as an exact prefix, and that full prefill says the same."""
    report = answer.report
    assert (report.reason, str(report.selector_reason)) == (None, str(ALL_EXACT))
    assert [chunk.tier for chunk in report.chunks] == ["prefix cache"] * 3
    assert [chunk.recomputed for chunk in report.chunks] == [0, 0, 150 + 3 * 80 - KEPT]
    assert report.prefix_tokens == 150
    assert (report.reused_tokens, report.computed_tokens) == (KEPT, 20)
    assert answer.token_ids == engine.generate_full(prompt, GREEDY).token_ids
    torch.testing.assert_close(
        engine.score(prompt, answer.token_ids).log_probs,
        engine.score(prompt, answer.token_ids, full=True).log_probs,
        rtol=0,
        atol=2e-4,
    )


def test_the_third_question_over_the_same_passages_computes_the_question_alone(
    make_engine: EngineFactory,
) -> None:
    model = make_model("gemma3")
    engine = make_engine(with_model=model, recompute_ratio=0.3)
    engine.precompute(CHUNKS, progress=False)
    told = [when_idle(engine, with_chunks(question)).report for question in QUESTIONS[:2]]
    assert [report.prefix_tokens for report in told] == [0, REUSED]
    assert all(report.recomputed_tokens == 72 for report in told)
    with rows_of(model) as rows:
        third = asked(engine, with_chunks(QUESTIONS[2]))
    assert rows == [150 + 3 * 80 + 20 - KEPT]
    is_exact(third, engine, with_chunks(QUESTIONS[2]))
    assert anew(engine, with_chunks(QUESTIONS[2])).report.recomputed_tokens == 72
    more = asked(engine, prompt_of(INSTRUCTION, *CHUNKS[:2], CHUNKS[0], QUESTIONS[0])).report
    assert [chunk.tier for chunk in more.chunks] == ["prefix cache", "prefix cache", "host"]
    assert more.recomputed_tokens == 310 - 256 + 24


@pytest.mark.parametrize("lead_in", ["bos", "document"])
def test_what_was_computed_in_full_is_reused_at_the_second_question(
    make_engine: EngineFactory, lead_in: str
) -> None:
    engine = make_engine(recompute_ratio=1.0, lead_in=lead_in)
    engine.precompute([Document("one", [chunk.text for chunk in CHUNKS])], progress=False)
    first = asked(engine, with_chunks(QUESTIONS[0]).text).report
    assert first.recomputed_tokens == sum(chunk.tokens for chunk in first.chunks)
    is_exact(asked(engine, with_chunks(QUESTIONS[1]).text), engine, with_chunks(QUESTIONS[1]))
    engine.evict_document("one")
    assert len(blocks(engine)) == BLOCKS
    assert asked(engine, with_chunks(QUESTIONS[2])).report.prefix_tokens == REUSED


def test_passages_are_kept_as_a_prefix_in_memory_until_one_is_deleted(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    store = TieredKVStore.open(kv_path=tmp_path)
    engine = make_engine(store=store, recompute_ratio=0.5)
    engine.precompute([Document("one", [chunk.text for chunk in CHUNKS])], progress=False)
    files = len([*tmp_path.rglob("*.safetensors")])
    for question in QUESTIONS[:2]:
        assert when_idle(engine, with_chunks(question).text).report.blended
    assert len(blocks(engine)) == KEPT // BLOCK_TOKENS
    assert len([*tmp_path.rglob("*.safetensors")]) == files + BLOCKS
    tenant = make_engine(store=engine.store, namespace="two")
    assert asked(tenant, with_chunks(QUESTIONS[2]).text).report.prefix_tokens == 0
    before = len(blocks(engine))
    engine.evict_document("one")
    assert len(blocks(engine)) == before - (KEPT // BLOCK_TOKENS - BLOCKS)
    again = asked(engine, with_chunks(QUESTIONS[3]).text)
    assert again.report.prefix_tokens == again.report.reused_tokens == REUSED
    assert again.token_ids == engine.generate_full(with_chunks(QUESTIONS[3]), GREEDY).token_ids


def test_a_busy_engine_computes_no_passages_again_and_few_wait(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(recompute_ratio=0.3)
    engine.precompute([Document("one", [chunk.text for chunk in CHUNKS])], progress=False)
    for question in QUESTIONS[:2]:
        asked(engine, with_chunks(question))
    assert not engine._idle._jobs, "nothing is computed between calls unless it is asked for"
    engine.fill_on_miss = True
    with monkeypatch.context() as busy:
        busy.setattr(TransformersEngine, "_is_idle", lambda _: False)
        for number in range(6):
            for question in QUESTIONS[:2]:
                asked(engine, prompt_of(INSTRUCTION[: -4 * number or None], *CHUNKS, question))
        assert 4 <= len(engine._idle._jobs) + 1 <= 5  # the first one may have begun to wait
        assert not engine.prefixes.passages.keys
        engine.evict_document("one")
    when_idle(engine, without(QUESTIONS[0]))
    assert not engine.prefixes.passages.keys, "they were deleted before they were computed"


def test_engines_around_a_store_share_it_and_tenants_do_not(make_engine: EngineFactory) -> None:
    store = TieredKVStore.open()
    asked(make_engine(store=store, namespace="one", lead_in="none"), without(QUESTIONS[0]))
    other = make_engine(store=store, namespace="one", lead_in="document", instruction="w9")
    assert asked(other, without(QUESTIONS[1])).report.prefix_tokens == REUSED
    tenant = make_engine(store=store, namespace="two", lead_in="none")
    assert asked(tenant, without(QUESTIONS[1])).report.prefix_tokens == 0
    assert asked(tenant, without(QUESTIONS[2])).report.prefix_tokens == REUSED
    elsewhere = make_engine(store=store, namespace="one", with_model=make_model("qwen2"))
    assert asked(elsewhere, without(QUESTIONS[1])).report.prefix_tokens == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_computed_and_stored_again(
    make_engine: EngineFactory, tmp_path: Path, damage: str
) -> None:
    engine = make_engine(store=on_disk(tmp_path), recompute_ratio=0.3)
    engine.precompute(CHUNKS, progress=False)
    asked(engine, with_chunks(QUESTIONS[0]))
    first = next(key for key in blocks(engine) if not key.context_id)
    (victim,) = tmp_path.glob(f"??/*{first}*.safetensors")
    victim.write_bytes(DAMAGES[damage](victim.read_bytes()))
    alone, again = anew(engine, with_chunks(QUESTIONS[1])), asked(engine, with_chunks(QUESTIONS[1]))
    assert again.token_ids == alone.token_ids
    assert again.report.prefix_tokens in (0, BLOCK_TOKENS)  # the second block is sound
    assert asked(engine, with_chunks(QUESTIONS[2])).report.prefix_tokens == REUSED


def test_nothing_is_stored_of_a_model_that_changed_meanwhile(make_engine: EngineFactory) -> None:
    model = make_model("llama")
    engine = make_engine(with_model=model)
    stream = engine.stream(without(QUESTIONS[0]), GREEDY)
    next(stream)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert list(stream)[-1].generation is not None
    engine.prefixes.drain()
    assert blocks(engine) == []


def test_rounded_kv_is_not_exact(make_engine: EngineFactory) -> None:
    rounds, keeps = (
        make_engine(store=TieredKVStore.open(precision=precision))
        for precision in ("fp8", "native")
    )
    for engine in (rounds, keeps):
        asked(engine, without(QUESTIONS[0]))
    assert asked(rounds, without(QUESTIONS[1])).report.prefix_tokens == 0
    assert asked(keeps, without(QUESTIONS[1])).report.prefix_tokens == REUSED
    assert (len(blocks(rounds)), len(blocks(keeps))) == (0, BLOCKS)
