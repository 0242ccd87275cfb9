"""Families of models on vLLM: ratio 1 is vLLM's own prefill, ratio 0 plain reuse; see models.py."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag import BlendConfig, BlendPrompt, Document, Engine, Generation, open_engine
from tests.families.models import LAYERS, WINDOW, save_family, with_outliers
from tests.families.reference import (
    DOCUMENTS,
    OTHER_BLOCKS,
    asked,
    error,
    in_16_bits,
    off,
    own_logits,
    retrieved,
    three_chunks,
    together,
)
from tests.models import make_tokenizer, prompt_of, words

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.usefixtures("_forked_and_eager"),
]

KINDS = {
    "llama": "full attention in all layers",
    "llama, yarn": "a rotary table that scales keys",
    "mistral": "a window in all layers",
    "gemma2": "windows in some layers, capped logits, a scale of its own",
    "qwen2_moe": "experts that are given other blocks of rows here than there",
    "cohere2": "rotary pairs side by side, layers without rotary, LayerNorm",
    "exaone_moe": "experts, shared ones too, beside windows",
    "glm4": "a part of each head turned, in pairs side by side",
    "granite": "layers that pass on a bare state, multipliers",
    "stablelm": "layers that return two values and have no residual",
    "gpt_neox": "vLLM's Transformers backend, a part of each head turned, LayerNorm",
    "olmo3": "the same backend with windows in some layers",
    "smollm3": "the same backend with layers without rotary",
}
"""Families, and what each alone has of what the connector treats in its own way: how layers are
called and what they return, rotary layouts and tables, windows, scales, caps, experts. To the
connector qwen3, phi3, ernie4_5 and others are like one of these; all of them are tried by
`python -m tests.families --vllm`."""
IN_BFLOAT16 = ("gemma2", "glm4", "qwen2")
REFUSED = {"bloom": "ALiBi", "gpt2": "learned positions"}

ROUNDING = {"qwen2_moe": OTHER_BLOCKS}
"""Experts are given all rows of a step at once, here in other blocks than there."""
AS_VLLM: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": WINDOW + 1},
    "gemma2": {"attn_implementation": "eager"},
    "qwen2_moe": {"layer_types": ["full_attention"] * LAYERS},
}
"""What has transformers compute what vLLM does: a window one token wider, caps, no windows."""
NOT_ON_031 = {"exaone_moe": "it reads a field that the config lacks"}
"""Families that vLLM 0.31 cannot load, and why."""

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", cost_model=False, reuse_prefix=False)
ALL, SOME, NONE = (CONFIG.with_ratio(ratio) for ratio in (1.0, 0.3, 0.0))
UNKNOWN = Document("unknown", (words(80, 31),))


@contextmanager
def opened(folder: Path, dtype: str = "float32") -> Iterator[Engine]:
    options = {"tokenizer": make_tokenizer(), "dtype": dtype}
    engine = open_engine("vllm", model=folder, config=CONFIG, **options)
    try:
        yield engine
    finally:
        engine.close()


def told(answer: Generation) -> list[float]:
    """The log-probabilities of an answer's tokens."""
    assert answer.logprobs is not None
    return [one.logprob for one in answer.logprobs]


def difference(engine: Engine, prompt: BlendPrompt, config: BlendConfig) -> float:
    """Largest difference of log-probabilities between a blend and vLLM's own prefill."""
    blended = engine.generate(prompt, asked(6), config=config)
    full = engine.generate_full(prompt, asked(6))
    return max(abs(a - b) for a, b in zip(told(blended), told(full), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_family_is_blended_as_vllm_and_its_own_model_compute(name: str, tmp_path: Path) -> None:
    check_release(name)
    folder = save_family(name, tmp_path)
    with opened(folder) as engine:
        assert engine.blend_refusal is None
        report = engine.precompute(DOCUMENTS, progress=False)
        assert (report.computed, report.refused) == (4, {})
        check_ratios(engine, ROUNDING.get(name, 0.0))
        check_what_is_missing(engine, ROUNDING.get(name, 0.0))
        check_own_model(engine, own_model(name, folder))


def own_model(name: str, folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **AS_VLLM.get(name, {}))


def check_release(name: str) -> None:
    from vllm import __version__

    if __version__.startswith("0.31.") and name in NOT_ON_031:
        pytest.skip(f"vLLM {__version__}: {NOT_ON_031[name]}")


def check_ratios(engine: Engine, rounding: float) -> None:
    """Ratio 1 is vLLM's prefill bit for bit; less is not, and is blended all the same."""
    prompt = retrieved()
    assert difference(engine, prompt, ALL) <= rounding
    reused = difference(engine, prompt, NONE)
    assert reused > 1e-4, "plain reuse of moved chunks is never exact"
    assert math.isfinite(reused)
    some = engine.generate(prompt, asked(6), config=SOME).report
    assert [chunk.hit for chunk in some.chunks] == [True] * 3
    assert some.recomputed_tokens > 0


def check_what_is_missing(engine: Engine, rounding: float) -> None:
    """Where nothing is stored, vLLM computes all."""
    engine.register([UNKNOWN])
    prompt = prompt_of(words(9, 51), *UNKNOWN.to_chunks(), " w7 ", words(23, 11))
    answer = engine.generate(prompt, asked(6), config=NONE)
    assert [chunk.hit for chunk in answer.report.chunks] == [False]
    assert not answer.report.blended
    full = engine.generate_full(prompt, asked(6))
    assert told(answer) == pytest.approx(told(full), rel=0, abs=rounding)


def check_own_model(engine: Engine, model: PreTrainedModel) -> None:
    """Both ends are what the model's own forward says."""
    prompt, chunks = three_chunks()
    engine.precompute(chunks, progress=False)
    for config, reusing in ((ALL, False), (NONE, True)):
        answer = engine.generate(prompt, asked(6), config=config)
        logits = own_logits(model, prompt, answer, reusing=reusing)
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
        assert off(answer, logits) <= 1e-4


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_family_with_outliers_is_as_precise_in_bfloat16_as_vllm_and_its_own_model(
    name: str, tmp_path: Path
) -> None:
    folder = save_family(name, tmp_path)
    model = with_outliers(own_model(name, folder)).to(torch.bfloat16)
    model.save_pretrained(folder)
    wide = deepcopy(model).float()
    with opened(folder, "bfloat16") as engine:
        assert engine.blend_refusal is None
        for config, reusing in ((ALL, False), (NONE, True)):
            errors, own = [], []
            for prompt, answer, wanted in in_16_bits(engine, wide, config, 4, reusing=reusing):
                errors.append(error(answer, wanted))
                if reusing:
                    itself = own_logits(model, prompt, answer, reusing=True)
                    own.append(error(answer, wanted, by=itself))
                else:
                    full = engine.generate_full(prompt, asked(4))
                    own.append(error(full, own_logits(wide, prompt, full, reusing=False)))
            assert together(errors) < 1.5 * together(own)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_refused_answers_as_vllm_and_its_own_model(
    name: str, tmp_path: Path
) -> None:
    folder = save_family(name, tmp_path)
    with opened(folder) as engine:
        assert REFUSED[name] in str(engine.blend_refusal)
        prompt, chunks = three_chunks()
        assert engine.precompute(chunks, progress=False).computed == 0
        answer = engine.generate(prompt, asked(6))
        assert not answer.report.blended
        assert str(engine.blend_refusal) in str(answer.report.reason)
        assert told(answer) == told(engine.generate_full(prompt, asked(6)))
        wanted = own_logits(own_model(name, folder), prompt, answer, reusing=False)
        assert wanted.argmax(-1).tolist() == list(answer.token_ids)
