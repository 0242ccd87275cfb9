"""The doctor over vLLM: what its reports and comparisons allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_rag import Chunk, diagnose
from tests.models import prompt_of, words

if TYPE_CHECKING:
    from tests.engines.vllm.inprocess import InProcessEngine

CHUNKS = [Chunk(words(250, seed)) for seed in range(4)]
PROMPT = prompt_of(words(8, 90), *CHUNKS, words(20, 91))


def test_a_ratio_that_is_too_high_is_named_first(llama: InProcessEngine) -> None:
    llama.precompute(CHUNKS, progress=False)
    config = llama.config.with_changes(recompute_ratio=0.9)
    diagnosis = diagnose(llama, PROMPT, config=config, runs=1, answer_tokens=4)
    found, now = diagnosis.findings[0], diagnosis.evidence.in_force
    assert found.code == "ratio_too_high"
    assert found.evidence["compute_share_at_proposed"] < found.evidence["compute_share"]
    assert now is not None
    assert now.loss is not None
    assert diagnosis.evidence.load is None


def test_chunks_that_are_not_stored_are_named(llama: InProcessEngine) -> None:
    llama.register(CHUNKS)
    diagnosis = diagnose(llama, PROMPT, runs=1, answer_tokens=4)
    assert [one.code.value for one in diagnosis.findings] == ["not_stored"]
    assert diagnosis.findings[0].evidence["chunks_missed"] == 4
