"""The guard in vLLM: a worker finds what the embedded engine finds."""

from __future__ import annotations

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
from tests.engines.vllm.inprocess import InProcessEngine
from tests.kv.samples import until
from tests.models import make_tokenizer, prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.2, cost_model=False)
GREEDY = SamplingParams.greedy(max_tokens=5, ignore_eos=True)
EVERY = GuardConfig(sample_share=1.0)
DOCUMENT = Document("d", tuple(words(40 + i, i) for i in range(4)), separator=" w77 ")
ALONE = [Chunk(words(40, seed)) for seed in (11, 12)]


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
