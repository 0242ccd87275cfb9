"""A model's own sampling settings are followed as vLLM itself, and its server, follow them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, Chunk, SamplingParams
from cacheblend_rag.engines.sampling import ResolvedSampling
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.models import QWEN_SAMPLING, make_tokenizer, prompt_of, save_model, words

TOKENS = 16
SEEDS = (1, 2, 3)
CHUNKS = [Chunk(words(60, 1)), Chunk(words(40, 2))]
PROMPT = prompt_of(words(5, 3), *CHUNKS, words(9, 4))
ALL = BlendConfig(min_tokens=0, recompute_ratio=1.0, selector="prior", cost_model=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the settings of Qwen2.5-Instruct's generation_config."""
    folder = tmp_path_factory.mktemp("models") / "drawing"
    save_model("llama", folder, head_dim=64, generation=QWEN_SAMPLING)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[InProcessEngine]:
    engine = InProcessEngine.open(folder, ALL)
    engine.precompute(CHUNKS, progress=False)
    yield engine
    engine.close()


def vllms_own(engine: InProcessEngine, seed: int) -> tuple[int, ...]:
    """What vLLM answers by the settings of its ``LLM.get_default_sampling_params``."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    default = engine.core.model_config.get_diff_sampling_param()
    sampling = VLLMSamplingParams.from_optional(
        **default, max_tokens=TOKENS, seed=seed, output_kind=RequestOutputKind.DELTA
    )
    request = request_of(engine, PROMPT, None, None, full=True)

    async def run() -> tuple[int, ...]:
        ids: list[int] = []
        async for step in engine.vllm.outputs(request, sampling):
            ids += step.outputs[0].token_ids
        return tuple(ids)

    return engine.transport.run(run())


def test_answers_are_drawn_as_vllm_draws_them(engine: InProcessEngine) -> None:
    assert engine.model_sampling == ResolvedSampling.of_model(QWEN_SAMPLING)
    expected = [vllms_own(engine, seed) for seed in SEEDS]
    assert len(set(expected)) == len(SEEDS)
    for seed, tokens in zip(SEEDS, expected, strict=True):
        sampling = SamplingParams(max_tokens=TOKENS, seed=seed)
        assert engine.generate_full(PROMPT, sampling).token_ids == tokens
        blended = engine.generate(PROMPT, sampling)
        assert blended.report.blended
        assert blended.token_ids == tokens
