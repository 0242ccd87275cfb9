"""The guard on the embedded engine: what it compares with what, and when it does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cacheblend_rag import BlendPrompt, Chunk, Document, SamplingParams, TransformersEngine
from cacheblend_rag.engines import guard
from cacheblend_rag.engines.guard import FEWEST, WINDOW, GuardState, Step, reference_of
from cacheblend_rag.engines.transformers import loop as loop_module
from cacheblend_rag.engines.transformers import prefill
from cacheblend_rag.prefill.comparing import Comparison
from cacheblend_rag.report import GuardReport
from cacheblend_rag.settings import BlendConfig, GuardConfig
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import until
from tests.models import make_model, make_tokenizer, prompt_of, words

GREEDY = SamplingParams.greedy(max_tokens=6, ignore_eos=True)
EVERY = GuardConfig(sample_share=1.0)
PATIENCE = 60.0
SEPARATOR = " w77 "


@pytest.fixture
def make_guarded(make_engine: EngineFactory) -> Iterator[EngineFactory]:
    """As make_engine, with every answer compared; ended with the test."""
    made: list[TransformersEngine] = []

    def make(config: GuardConfig = EVERY, **arguments: object) -> TransformersEngine:
        made.append(make_engine(**arguments))
        made[-1].guard = config
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asking(*chunks: Chunk, seed: int = 90) -> BlendPrompt:
    return prompt_of(words(5, seed), *(part for chunk in chunks for part in (chunk, "w7")), "w9")


def knowing_a_chunk(make_guarded: EngineFactory) -> tuple[TransformersEngine, list[Chunk]]:
    engine, chunks = make_guarded(), [Chunk(words(40, 3))]
    engine.precompute(chunks, progress=False)
    return engine, chunks


@contextmanager
def never_idle() -> Iterator[None]:
    """No model counts as idle meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "QUIET_SECONDS", PATIENCE)
        yield


def settled(engine: TransformersEngine) -> GuardReport:
    """The report once no sample waits."""
    assert until(lambda: not engine.guard_report().waiting, PATIENCE)
    return engine.guard_report()


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The mean KL divergence over tokens, by PyTorch."""
    return float(torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_alone_chunks_are_compared_with_the_prompt(family: str) -> None:
    chunks = [Chunk(words(40, seed)) for seed in (1, 2, 3)]
    config = BlendConfig(recompute_ratio=0.2, min_tokens=0, cost_model=False)
    engine = TransformersEngine(
        make_model(family),
        tokenizer=make_tokenizer(),
        config=config,
        lead_in="instruction",
        guard=EVERY,
    )
    engine.precompute(chunks, progress=False)
    prompt = asking(*chunks)
    answer = engine.generate(prompt, GREEDY)
    report = settled(engine)
    told = answer.token_ids
    full, blended = engine.score(prompt, told, full=True), engine.score(prompt, told)
    assert report.compared == 1
    assert report.prefill_divergence == 0
    assert report.divergence == pytest.approx(
        divergence(full.log_probs, blended.log_probs), rel=1e-3, abs=1e-6
    )
    assert report.divergence > 1e-3
    engine.close()


def test_contextual_chunks_are_compared_with_their_documents(make_guarded: EngineFactory) -> None:
    document = Document("d", tuple(words(20 + i, i) for i in range(4)), separator=SEPARATOR)
    chunks = document.to_chunks()
    engine = make_guarded(lead_in="document")
    engine.precompute([document], progress=False)
    prompt = asking(chunks[2])
    answer = engine.generate(prompt, GREEDY)
    report = settled(engine)
    before = words(5, 90), chunks[0].text, "w77", chunks[1].text, "w77", chunks[2].text, "w7 w9"
    engine.guard = None
    reference = engine.score(" ".join(before), answer.token_ids, full=True)
    plain = engine.score(prompt, answer.token_ids, full=True)
    blended = engine.score(prompt, answer.token_ids)
    assert report.compared == 1
    wanted = divergence(reference.log_probs, blended.log_probs)
    assert report.divergence == pytest.approx(wanted, rel=1e-3)
    wanted = divergence(reference.log_probs, plain.log_probs)
    assert report.prefill_divergence == pytest.approx(wanted, rel=1e-3)
    assert wanted > 1e-3


def test_a_reference_holds_each_piece_once(make_guarded: EngineFactory) -> None:
    document = Document("d", tuple(words(9, i) for i in range(5)), separator=SEPARATOR)
    c = document.to_chunks()
    engine = make_guarded(lead_in="document")
    engine.precompute([document, alone := Chunk(words(8, 70))], progress=False)

    def wanted(*parts: str) -> tuple[int, ...]:
        return tuple(engine.tokenize(" ".join(parts)))

    def found(prompt: BlendPrompt, most: int = 1000) -> tuple[int, ...] | None:
        return reference_of(engine.prepare(prompt), engine._led, most)

    t = [chunk.text for chunk in c]
    skipping = prompt_of("w5", c[1], "w7", alone, "w7", c[3], "w9")
    assert found(skipping) == wanted(
        "w5", t[0], "w77", t[1], "w7", alone.text, "w7", "w77", t[2], "w77", t[3], "w9"
    )
    backwards = prompt_of("w5", c[2], "w7", c[1], "w9")
    assert found(backwards) == wanted("w5", t[0], "w77", t[1], "w77", t[2], "w7", t[1], "w9")
    spaced = Document("e", tuple(words(9, i) for i in range(60, 62)), separator="\n\n")
    engine.precompute([spaced], progress=False)
    in_order = prompt_of("w5", spaced.to_chunks()[0], "w7", spaced.to_chunks()[1], "w9")
    assert found(in_order) == engine.prepare(in_order).token_ids
    assert found(skipping, most=40) is None


def test_waiting_prompts_are_bounded_and_go_with_the_engine(
    make_guarded: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_WAITING", 2)
    engine, chunks = knowing_a_chunk(make_guarded)
    with never_idle():
        for seed in range(5):
            engine.generate(asking(*chunks, seed=seed), GREEDY)
        time.sleep(0.1)
        assert 2 <= engine.guard_report().waiting <= 3
        assert engine.guard_report().dropped >= 2
        engine.close()
    assert engine.guard_report().waiting == 0
    assert engine.guard_report().compared == 0


def test_steps_are_reported_and_logged_without_texts(
    make_guarded: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    config = GuardConfig(sample_share=1.0, limit=1e-6, ratios=(0.5,))
    engine = make_guarded(config, recompute_ratio=0.1, lead_in="instruction", cost_model=False)
    chunks = [Chunk(words(40, seed)) for seed in (1, 2)]
    engine.precompute(chunks, progress=False)
    seen: list[str] = []
    with caplog.at_level(logging.DEBUG):
        for seed in range(400):
            report = engine.generate(asking(*chunks, seed=seed), GREEDY).report
            settled(engine)
            code = report.reason_code or (report.ratio_reason and report.ratio_reason.code)
            if not seen or seen[-1] != str(code):
                seen.append(str(code))
            if not report.blended:
                break
    assert seen == ["None", "guard_raised", "guard_stopped"]
    told = engine.guard_report()
    assert (told.raised, told.stopped, told.ratio) == (1, True, 1.0)
    assert {chunk.reason for chunk in report.chunks} == {"stopped by the guard"}
    said = [one.getMessage() for one in caplog.records if "guard" in one.name]
    assert len(said) == 2
    every_word = {word for one in caplog.records for word in one.getMessage().split()}
    assert not every_word & set(chunks[0].text.split())
    engine.reset_guard()
    assert engine.generate(asking(*chunks), GREEDY).report.blended
    assert not engine.guard_report().stopped


def test_a_comparison_without_memory_is_dropped(
    make_guarded: EngineFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, chunks = knowing_a_chunk(make_guarded)

    def lacking(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(prefill, "compare", lacking)
    engine.generate(asking(*chunks), GREEDY)
    assert settled(engine).dropped == 1
    assert "is not compared" in caplog.text
    assert engine.generate(asking(*chunks), GREEDY).report.blended


CONFIG = GuardConfig(ratios=(0.1, 0.3, 0.5))
OWN = 0.16


def taken(state: GuardState, blend: float, prefill: float = 0.0, most: int = 2000) -> Step | None:
    """The next step under samples that spread around these divergences; None without one."""
    draw = np.random.default_rng(state.steps)
    for factor in draw.exponential(size=most):
        if step := state.take(Comparison(blend * factor, prefill * factor)):
            return step
    return None


def test_it_falls_only_well_below_the_limit_and_not_at_once() -> None:
    state = GuardState(CONFIG, OWN)
    assert taken(state, 0.4) == "up"
    assert taken(state, 0.7 * CONFIG.limit) is None, "between: it stays"
    state = GuardState(CONFIG, OWN)
    assert taken(state, 0.4) == "up"
    assert taken(state, 0.01, most=WINDOW - 1) is None
    assert taken(state, 0.01) == "down"
    assert state.ratio == 0.0


def test_a_fall_that_failed_is_not_tried_again_soon() -> None:
    state, waits = GuardState(CONFIG, OWN), []
    for _ in range(3):
        assert taken(state, 0.4) == "up"
        found = (state.take(Comparison(0.001)) for _ in range(8 * WINDOW))
        waits.append(next(count for count, step in enumerate(found, start=1) if step == "down"))
    assert waits[0] >= WINDOW
    assert waits[1] >= 2 * WINDOW
    assert waits[2] >= 4 * WINDOW


@pytest.mark.parametrize("seed", range(2))
def test_contextual_kv_that_is_nearer_to_its_documents_is_left_alone(seed: int) -> None:
    """Both diverge by far more than the limit, ordinary prefill by more: it is no remedy."""
    state, draw = GuardState(CONFIG, OWN), np.random.default_rng(seed)
    for blend, full in zip(draw.exponential(0.4, 1500), draw.exponential(0.8, 1500), strict=True):
        assert state.take(Comparison(blend, full)) is None
    assert state.ratio == 0.0
    assert state.mean < 0


def test_a_gross_excess_is_noticed_soon_and_a_small_one_by_the_mean_of_many() -> None:
    gross = GuardState(CONFIG, OWN)
    steps = [gross.take(Comparison(2.0)) for _ in range(30)]
    assert steps.index("up") < 20
    small = GuardState(CONFIG, OWN)
    steps = [small.take(Comparison(1.1 * CONFIG.limit)) for _ in range(FEWEST)]
    assert "up" in steps
    assert steps.index("up") > 0.8 * FEWEST
