"""Families of models on the embedded engine, each held against its own model; see models.py."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_rag import BlendConfig, BlendPrompt, TransformersEngine
from tests.families.models import builders, with_outliers
from tests.families.reference import (
    asked,
    error,
    in_16_bits,
    off,
    own_logits,
    three_chunks,
    together,
)
from tests.models import make_tokenizer, words

BLENDED = (
    "afmoe", "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4",
    "exaone_moe", "gemma2", "gemma3, linear", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "helium", "hyperclovax", "llama", "llama, biases",
    "llama, llama3", "llama, part of a head", "llama, yarn", "minimax_m2", "mistral",
    "mixtral, window", "nanochat", "nemotron", "olmo2", "olmo3", "phi", "phi3", "phimoe", "qwen2",
    "qwen2, window", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "seed_oss",
    "smollm3", "stablelm, parallel", "starcoder2", "vaultgemma",
)  # fmt: skip
IN_BFLOAT16 = (
    "cohere2", "gemma3_text", "glm4", "llama, yarn", "modernbert-decoder", "qwen2", "qwen3_moe",
)  # fmt: skip
"""One of each kind of norm, rotary layout, window and expert."""
REFUSED = {
    "bloom": "ALiBi",
    "gpt2": "learned positions",
    "mpt": "ALiBi",
    "phi3, longrope": "longrope",
}
CONFIG = BlendConfig(min_tokens=0, cost_model=False, reuse_prefix=False)
ALL, NONE = CONFIG.with_ratio(1.0), CONFIG.with_ratio(0.0)


def opened(model: PreTrainedModel) -> TransformersEngine:
    return TransformersEngine(model, tokenizer=make_tokenizer(), config=CONFIG, lead_in="none")


@pytest.mark.parametrize("name", BLENDED)
def test_a_family_is_blended_as_its_own_model_computes(name: str) -> None:
    model = builders()[name]()
    engine = opened(model)
    assert engine.blend_refusal is None
    prompt, chunks = three_chunks()
    engine.precompute(chunks, progress=False)
    wanted = {}
    for config, reusing in ((ALL, False), (NONE, True)):
        answer = engine.generate(prompt, asked(16), config=config)
        assert [chunk.hit for chunk in answer.report.chunks] == [True] * 3
        assert answer.report.recomputed_tokens == (0 if reusing else 270)
        logits = wanted[reusing] = own_logits(model, prompt, answer, reusing=reusing)
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
        assert off(answer, logits) <= 1e-5
    first = wanted[True][0] - wanted[False][0]
    assert first.abs().max() > 1e-3, "the case must tell reuse from prefill"
    engine.close()


def test_a_passage_joined_with_the_text_beside_it_is_reused_where_it_stands() -> None:
    """Its first and its last word make other tokens with the brackets beside them."""
    model = builders()["llama"]()
    engine = opened(model)
    _, (chunk, *_) = three_chunks()
    engine.precompute([chunk], progress=False)
    prompt = BlendPrompt.of(f"{words(5, 8)} (", chunk, f") {words(3, 9)}")
    answer = engine.generate(prompt, asked(4), config=NONE)
    (found,) = answer.report.chunks
    assert (found.hit, found.start, found.tokens) == (True, 6, 88)
    first, *_, last = make_tokenizer()(chunk.text)["input_ids"]
    wanted = own_logits(model, prompt, answer, reusing=True, edges=([first], [last]))
    assert off(answer, wanted) <= 1e-5
    engine.close()


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_family_with_outliers_is_as_precise_in_bfloat16_as_its_own_model(name: str) -> None:
    model = with_outliers(builders()[name]()).to(torch.bfloat16)
    wide = deepcopy(model).float()
    engine = opened(model)
    assert engine.blend_refusal is None
    for config, reusing in ((ALL, False), (NONE, True)):
        errors, own = [], []
        for prompt, answer, wanted in in_16_bits(engine, wide, config, 8, reusing=reusing):
            itself = own_logits(model, prompt, answer, reusing=reusing)
            errors.append(error(answer, wanted))
            own.append(error(answer, wanted, by=itself))
        assert together(errors) < 1.5 * together(own)
    engine.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_refused_answers_as_its_own_model(name: str) -> None:
    model = builders()[name]()
    engine = opened(model)
    assert REFUSED[name] in str(engine.blend_refusal)
    prompt, chunks = three_chunks()
    report = engine.precompute(chunks, progress=False)
    assert report.computed == 0
    answer = engine.generate(prompt, asked(16))
    assert not answer.report.blended
    assert str(engine.blend_refusal) in str(answer.report.reason)
    wanted = own_logits(model, prompt, answer, reusing=False)
    assert wanted.argmax(-1).tolist() == list(answer.token_ids)
    engine.close()
