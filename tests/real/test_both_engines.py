"""SmolLM2 on both engines: the same tokens in float32, in bfloat16 up to a close choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import (
    BlendConfig,
    ChatPrompt,
    Document,
    SamplingParams,
    StructuredOutputs,
    TransformersEngine,
)
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
FORM = StructuredOutputs(
    json={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        },
        "required": ["name", "year"],
    }
)
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the passages.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}
SEARCHED = {"name": "search", "arguments": '{"query": "lamp"}'}
OBSERVED: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": SEARCHED}],
    },
    {
        "role": "tool",
        "tool_call_id": "a1b2c3d4e",
        "content": "\n\n".join(passage.text for passage in PASSAGES[:2]),
    },
]
GREEDY_CALL = SamplingParams(temperature=0.0, max_tokens=48)
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
        config = CONFIG.with_changes(recompute_ratio=ratio, reuse_prefix=False)
        told = [engine.generate(PROMPTS[0], GREEDY, config=config) for engine in pair]
        assert told[0].token_ids == told[1].token_ids
        assert told[0].report.reused_tokens == told[1].report.reused_tokens > 0


def test_forms_tools_and_log_probabilities_agree_in_float32(
    pair: tuple[VLLMEngine, TransformersEngine],
) -> None:
    if pair[1].dtype != "float32":
        pytest.skip("16 bits may choose otherwise between close tokens")
    messages = [{"role": "user", "content": "Who lit the lamp at Vell, and when?"}]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    asked = SamplingParams(max_tokens=24, temperature=0.0, logprobs=3, **penalties)
    there, here = (engine.generate(messages, asked) for engine in pair)
    assert there.text == here.text
    assert there.logprobs is not None
    assert here.logprobs is not None
    for one, other in zip(there.logprobs, here.logprobs, strict=True):
        assert [token for token, _, _ in one.top] == [token for token, _, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    asked = SamplingParams(max_tokens=48, temperature=0.0, structured_outputs=FORM)
    required = ChatPrompt(messages, [SEARCH], "required")
    for engine in pair:  # which write JSON with and without blanks
        assert set(json.loads(engine.generate(messages, asked).text)) == {"name", "year"}
        [call] = engine.generate(required, GREEDY_CALL).tool_calls
        assert call.name == SEARCH["function"]["name"]
        assert isinstance(json.loads(call.arguments), dict)
    prompt = ChatPrompt([*messages, *OBSERVED], [SEARCH])
    there, here = (engine.generate(prompt, GREEDY_CALL) for engine in pair)
    assert (there.text, there.prompt_tokens) == (here.text, here.prompt_tokens)
    hits = [[chunk.hit for chunk in each.report.chunks] for each in (there, here)]
    assert hits == [[True, True]] * 2
