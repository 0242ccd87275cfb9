"""The connector: what it refuses, how much it promises, what it reports and counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from transformers import AutoModelForCausalLM

from cacheblend_rag import BlendConfig
from tests.engines.vllm.exactness import SHORT
from tests.engines.vllm.inprocess import InProcessEngine
from tests.families.reference import DOCUMENTS, retrieved

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)


# Refusals


def check_refused(engine: InProcessEngine, said: str) -> None:
    """Ordinary prefill answers, and says why."""
    report = engine.precompute(DOCUMENTS, progress=False)
    assert report.computed == 0
    assert sum(report.refused.values()) == 4
    answer = engine.generate(retrieved(), SHORT)
    assert not answer.report.blended
    assert said in str(answer.report.reason)
    assert answer.token_ids == engine.generate_full(retrieved(), SHORT).token_ids
    status = engine.transport.ask_status()
    assert not status.active
    assert status.problem is not None
    assert status.problem.code.startswith("unsupported_")
    assert said in status.problem


def test_a_refused_model_is_served_by_ordinary_prefill(model_folder: Callable[[str], Path]) -> None:
    with closing(InProcessEngine.open(model_folder("gpt2"), CONFIG)) as engine:
        check_refused(engine, "learned positions")


# Other weights


def hits(engine: InProcessEngine, opening: int) -> set[bool]:
    """Whether a prompt's chunks are found; opening: of words that no prompt had before.

    Whatever is found, the answer is that of full prefill with the weights of today.
    """
    prompt, exact = retrieved(opening=opening), engine.config.with_ratio(1.0)
    answer = engine.generate(prompt, SHORT, config=exact)
    engine.core.reset_prefix_cache()
    assert answer.token_ids == engine.generate_full(prompt, SHORT).token_ids
    return {chunk.hit for chunk in answer.report.chunks}


def test_chunks_of_other_weights_are_not_found_and_those_of_the_same_are(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, other = model_folder("llama"), tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(folder)
    for weight in model.parameters():
        weight.data.mul_(1.5)
    model.save_pretrained(other)
    with closing(InProcessEngine.open(folder, CONFIG)) as engine:

        def load(path: Path) -> None:
            engine.core.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})

        def stored() -> int:
            return engine.precompute(DOCUMENTS, progress=False).computed

        assert (stored(), hits(engine, 50)) == (4, {True})
        assert engine.core.reset_prefix_cache(reset_connector=True)
        assert hits(engine, 51) == {True}  # the same weights, as after sleep level 1
        load(other)
        assert hits(engine, 52) == {False}
        assert (stored(), hits(engine, 53)) == (4, {True})
        load(folder)
        assert hits(engine, 54) == {True}
