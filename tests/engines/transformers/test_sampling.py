"""Answers are drawn as transformers' own ``generate`` draws them, by the model's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from cacheblend_rag import BlendConfig, Chunk, SamplingParams, TransformersEngine
from tests.models import QWEN_SAMPLING, make_model, make_tokenizer, prompt_of, words

TOKENS = 24
CHUNKS = [Chunk(words(60, 1)), Chunk(words(40, 2))]
PROMPT = prompt_of(words(5, 3), *CHUNKS, words(9, 4))
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "qwen": QWEN_SAMPLING,
    "whole numbers": {"do_sample": True, "temperature": 2.0, "top_k": 7},
    "min_p": {"do_sample": True, "temperature": 1.5, "min_p": 0.1, "top_p": 0.95, "top_k": 0},
    "greedy in spite of a temperature": {"temperature": 0.7, "top_p": 0.5},
    "greedy by name": {**QWEN_SAMPLING, "do_sample": False},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[TransformersEngine]:
    config = BlendConfig(min_tokens=0, recompute_ratio=1.0, cost_model=False)
    engine = TransformersEngine(model, tokenizer=make_tokenizer(), config=config)
    engine.precompute(CHUNKS, progress=False)
    yield engine
    engine.close()


def generated(model: PreTrainedModel, seed: int, **arguments: Any) -> tuple[int, ...]:
    """What transformers makes of the prompt, by the model's settings unless they are given."""
    ids = torch.tensor([make_tokenizer()(PROMPT.text)["input_ids"]])
    torch.manual_seed(seed)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **arguments
    )
    return tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_models_settings_are_followed(
    engine: TransformersEngine, model: PreTrainedModel, name: str
) -> None:
    model.generation_config = GenerationConfig(**CONFIGS[name], pad_token_id=0)
    for seed in (0, 1):
        expected = generated(model, seed)
        sampling = SamplingParams(max_tokens=TOKENS, seed=seed)
        assert engine.generate_full(PROMPT, sampling).token_ids == expected
        blended = engine.generate(PROMPT, sampling)
        assert blended.report.blended
        assert blended.token_ids == expected


def test_what_is_asked_for_replaces_the_models(
    engine: TransformersEngine, model: PreTrainedModel
) -> None:
    model.generation_config = GenerationConfig(**QWEN_SAMPLING, pad_token_id=0)
    asked: dict[str, Any] = {"temperature": 1.8, "top_k": 5, "repetition_penalty": 1.0}
    expected = generated(model, 3, **asked)
    sampling = SamplingParams(max_tokens=TOKENS, seed=3, **asked)
    assert engine.generate(PROMPT, sampling).token_ids == expected
    greedy = generated(model, 3, do_sample=False, repetition_penalty=1.0)
    assert engine.generate(PROMPT, SamplingParams.greedy(TOKENS)).token_ids == greedy
