"""Blending SmolLM2 in every precision: as precise as the model is itself.

Errors are root mean squares over the vocabulary and over all prompts, of the first token's logits,
without what all logits have in common, which changes no answer. One logit, or one prompt, may by
luck come out closer in one of two computations that round equally much; thousands do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, SamplingParams, TransformersEngine
from tests.families.models import own_tokens

PASSAGES = (
    "The harbour of Tarn was dredged in 1874, after the third ferry in two years had run aground "
    "on its bar. Local merchants paid for half of the work and the county for the rest.",
    "Ada Brennock kept the records of the Tarn lifeboat from 1902 until her death. She counted "
    "ninety-one launches and noted for each the wind, the tide and the names of the crew.",
    "Kelp was burned on the shore every summer to make soda ash for the glassworks inland. The "
    "smoke could be seen from the mainland, twelve miles away, when the air was still.",
    "A fire in the winter of 1911 destroyed the ropewalk and eleven houses beside it. The owner, "
    "Josef Lindqvist, rebuilt in brick and had the first telephone on the island put in.",
    "The narrow-gauge railway from the quarry to the pier carried slate for thirty-four years. Its "
    "two locomotives, Heron and Curlew, were sold to a brewery when the line closed.",
    "Storm petrels nest in the old walls of the quarry. Volunteers ring about two hundred of them "
    "each year, and one bird was found again after twenty-six summers.",
)
QUESTIONS = (
    ("Who paid for dredging the harbour?", (0, 1, 3)),
    ("How many launches did Ada Brennock count?", (1, 4, 2)),
    ("What was kelp burned for?", (2, 5, 0)),
    ("Who had the first telephone on the island?", (3, 0, 5)),
)
FACTOR = 1.5
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
ALL = BlendConfig(recompute_ratio=1.0, min_tokens=0, cost_model=False)
LOW = ("bfloat16", "float16")


def prompts(bos: str) -> list[BlendPrompt]:
    chunks = [Chunk(passage) for passage in PASSAGES]
    found = []
    for question, chosen in QUESTIONS:
        parts: list[Any] = [f"{bos}Answer from these passages.\n\n"]
        for index in chosen:
            parts += [chunks[index], "\n\n"]
        found.append(BlendPrompt.of(*parts, f"Question: {question}\nAnswer:"))
    return found


class Opened:
    """An engine over a pretrained model."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.engine = TransformersEngine(folder, dtype=dtype, config=ALL, lead_in="bos")
        self.prompts = prompts(self.engine.tokenizer.bos_token)
        self.engine.precompute([Chunk(passage) for passage in PASSAGES], progress=False)

    def first_log_probs(self) -> list[Tensor]:
        """Of each prompt, blended with all tokens recomputed."""
        scored = [self.engine.score(prompt, (5,)) for prompt in self.prompts]
        for one in (each.report for each in scored):
            assert one.blended
            assert one.recomputed_tokens == sum(chunk.tokens for chunk in one.chunks)
        return [one.log_probs[0] for one in scored]

    def token_ids(self) -> list[Tensor]:
        return [
            torch.tensor([prompt.encode(self.engine.tokenizer).token_ids])
            for prompt in self.prompts
        ]

    @torch.no_grad()
    def own_log_probs(self) -> list[Tensor]:
        """Of each prompt, by the model's own forward."""
        found = (self.engine.model(ids, use_cache=False).logits for ids in self.token_ids())
        return [logits[0, -1].float().log_softmax(-1) for logits in found]


@pytest.fixture(scope="module")
def open_model(smollm2_folder: Path) -> Iterator[Callable[[str], Opened]]:
    """Return a function from a precision to the model opened in it; each is opened once."""
    get = cache(lambda dtype: Opened(smollm2_folder, dtype))
    yield get
    for dtype in ("float32", *LOW):
        get(dtype).engine.close()


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    off = torch.stack([f.float() - w.float() for f, w in zip(found, wanted, strict=True)])
    return float((off - off.mean(-1, keepdim=True)).square().mean().sqrt())


def test_in_float32_ratio_1_is_ordinary_prefill(open_model: Callable[[str], Opened]) -> None:
    opened = open_model("float32")
    model = opened.engine.model
    for found, wanted in zip(opened.first_log_probs(), opened.own_log_probs(), strict=True):
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
    for prompt, ids in list(zip(opened.prompts, opened.token_ids(), strict=True))[:2]:
        found = opened.engine.generate(prompt, GREEDY)
        with torch.no_grad():
            assert list(found.token_ids) == own_tokens(model, ids, 8)


@pytest.mark.parametrize("dtype", LOW)
def test_in_16_bits_ratio_1_is_as_near_to_float32_as_the_model_itself(
    dtype: str, open_model: Callable[[str], Opened]
) -> None:
    wanted, opened = open_model("float32").own_log_probs(), open_model(dtype)
    own = error(opened.own_log_probs(), wanted)
    assert own > 0, "rounding must show"
    assert error(opened.first_log_probs(), wanted) <= FACTOR * own
