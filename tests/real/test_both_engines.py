"""SmolLM2 on both engines: the same tokens in float32, in bfloat16 up to a close choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from tests.engines.vllm.opening import vllm_in_process

SAMPLE = load_passages()
PASSAGES = SAMPLE.passages[:8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=1.0, cost_model=False)
PROMPTS = [
    "\n\n".join([*(p.text for p in PASSAGES[start : start + 4]), f"Question: {q}\nAnswer:"])
    for start, q in zip((0, 4), (q.question for q in SAMPLE.questions), strict=False)
]
MOST_OVER = 1.5
"""How much further from float32 than the model's own 16-bit pass logits may be."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(
    smollm2_folder: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[VLLMEngine, TransformersEngine]]:
    documents = [Document(p.title, (p.text,)) for p in PASSAGES]
    options = {"enforce_eager": True, "max_model_len": 2048, "disable_log_stats": True}
    there = vllm_in_process("smollm2", dtype=request.param, config=CONFIG, **options)
    here = TransformersEngine("smollm2", dtype=request.param, config=CONFIG)
    with closing(there), closing(here):
        for engine in (there, here):
            engine.precompute(documents, progress=False)
        yield there, here


@pytest.fixture(scope="module")
def exact(smollm2_folder: Path) -> Iterator[TransformersEngine]:
    with closing(TransformersEngine("smollm2", dtype="float32")) as engine:
        yield engine


def next_logits(engine: TransformersEngine, ids: list[int]) -> torch.Tensor:
    """(vocabulary,) float32, of the token that the model itself expects behind ``ids``."""
    with torch.no_grad():
        return engine.model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_agree(
    pair: tuple[VLLMEngine, TransformersEngine], exact: TransformersEngine, prompt: str
) -> None:
    there, here = pair
    if here.dtype != "float32" and prompt != PROMPTS[0]:
        pytest.skip("in 16 bits, which many processors compute slowly, one prompt must do")
    full, blended = there.generate_full(prompt, GREEDY), there.generate(prompt, GREEDY)
    assert all(chunk.hit for chunk in blended.report.chunks)
    for mine, other in (
        (here.generate(prompt, GREEDY), blended),
        (here.generate_full(prompt, GREEDY), full),
    ):
        pairs = zip(mine.token_ids, other.token_ids, strict=False)
        agreed = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if mine.token_ids == other.token_ids:
            continue
        assert here.dtype == "bfloat16"
        before = [*here.prepare(prompt).token_ids, *agreed]
        wanted = next_logits(exact, before)
        bound = MOST_OVER * float((next_logits(here, before) - wanted).abs().max())
        first, second = wanted.topk(2).values.tolist()
        assert first - second < bound


def test_what_is_reused_without_recompute_agrees_in_float32(
    pair: tuple[VLLMEngine, TransformersEngine],
) -> None:
    if pair[1].dtype != "float32":
        pytest.skip("rows that deviate alike may be chosen otherwise in 16 bits")
    for ratio in (0.0, 0.15):
        config = CONFIG.with_ratio(ratio)
        told = [engine.generate(PROMPTS[0], GREEDY, config=config) for engine in pair]
        assert told[0].token_ids == told[1].token_ids
        assert told[0].report.reused_tokens == told[1].report.reused_tokens > 0
