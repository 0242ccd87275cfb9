"""VLLMEngine alone: ways of blending, preemption, and what cannot be blended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, SamplingParams, open_engine
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.errors import ConfigError, EngineUnavailableError, ModelLoadError
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.opening import request_of, share_cores, vllm_in_process
from tests.engines.vllm.test_exactness import DOCUMENTS, SHORT, logprobs, retrieved
from tests.engines.vllm.test_protocol import mixed_prompts, same_tokens

REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0)


def test_synchronous_blending_gives_the_same_answers(
    engine: VLLMEngine, open_vllm: EngineFactory
) -> None:
    waiting = open_vllm(settings=ConnectorSettings(asynchronous=False))
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
    prompts = mixed_prompts(8)
    long = SamplingParams(max_tokens=100)
    alone = [engine.generate(prompt, long) for prompt in prompts]
    assert same_tokens(alone, engine.generate_batch(prompts, long))


def test_a_request_without_its_salt_is_not_blended(engine: VLLMEngine) -> None:
    engine.precompute(DOCUMENTS, progress=False)
    asked = request_of(engine, retrieved(), SHORT, REUSE)
    unsalted = replace(asked, salt="any")
    reference = replace(asked, salt="other", job=None)
    assert logprobs(engine, unsalted) == logprobs(engine, reference)


def test_every_replica_has_the_chunks_and_answers_for_its_reports(
    open_vllm: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends requests to whichever replica is free; each has a memory of its own."""
    share_cores(monkeypatch)
    engine = open_vllm(config=REUSE, data_parallel_size=2)
    assert engine.status.replicas == 2
    assert engine.precompute(DOCUMENTS, progress=False).computed == 4
    for seed in range(4):
        whole = engine.generate(retrieved(seed=20 + seed), SHORT)
        *_, last = engine.stream(retrieved(seed=30 + seed), SHORT)
        assert last.generation is not None
        for answer in (whole, last.generation):
            assert [chunk.hit for chunk in answer.report.chunks] == [True] * 3
    for document in DOCUMENTS:
        engine.evict_document(document.document_id)
    for seed in range(4):
        report = engine.generate(retrieved(seed=40 + seed), SHORT).report
        assert [chunk.hit for chunk in report.chunks] == [False] * 3


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no-such-model") as caught:
        open_engine("vllm", model=str(tmp_path / "no-such-model"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="name or a folder"):
        open_engine("vllm", model=object())  # type: ignore[arg-type]


def test_a_vllm_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path]
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    with pytest.raises(EngineUnavailableError, match=r"vLLM 0\.31\.2 is too old, 0\.32 or newer"):
        vllm_in_process(model_folder("llama"))
