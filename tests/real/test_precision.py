"""Blending pretrained models in every precision: as precise as the models are themselves.

Errors are root mean squares over the vocabulary and over all prompts, of the first token's logits,
without what all logits have in common, which changes no answer. One logit, or one prompt, may by
luck come out closer in one of two computations that round equally much; thousands do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.engines.transformers import decoding
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
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """An engine over a pretrained model, and the logits and cache of its last request."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.engine = TransformersEngine(folder, dtype=dtype, config=ALL, lead_in="bos")
        self.prompts = prompts(self.engine.tokenizer.bos_token)
        self.logits: list[Tensor] = []
        if not all(bool(own.isfinite().all()) for own in self.own_logits()):
            self.engine.close()
            pytest.skip(f"the model's own forward overflows {dtype}")
        self.engine.precompute([Chunk(passage) for passage in PASSAGES], progress=False)

    def first_logits(self) -> list[Tensor]:
        """Of each prompt, blended with all tokens recomputed."""
        found = []
        with self._watched():
            for prompt in self.prompts:
                self.logits.clear()
                report = self.engine.generate(prompt, GREEDY.with_changes(max_tokens=1)).report
                assert report.blended
                assert report.recomputed_tokens == sum(chunk.tokens for chunk in report.chunks)
                found.append(self.logits[0][0])
        return found

    def token_ids(self) -> list[Tensor]:
        return [
            torch.tensor([prompt.encode(self.engine.tokenizer).token_ids])
            for prompt in self.prompts
        ]

    @torch.no_grad()
    def own_logits(self) -> list[Tensor]:
        """Of each prompt, by the model's own forward."""
        model = self.engine.model
        return [model(input_ids=ids, use_cache=False).logits[0, -1] for ids in self.token_ids()]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        own = decoding.Sampler.draw

        def draw(sampler: Any, logits: Tensor, token_ids: list[int]) -> int:
            self.logits.append(logits)
            return own(sampler, logits, token_ids)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding.Sampler, "draw", draw)
            yield


@pytest.fixture(scope="module", params=["smollm2_folder", "gemma3_folder"])
def open_model(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Opened]]:
    """Return a function from a precision to the model opened in it; each is opened once."""
    folder: Path = request.getfixturevalue(request.param)
    opened: dict[str, Opened] = {}

    def get(dtype: str) -> Opened:
        if dtype not in opened:
            opened[dtype] = Opened(folder, dtype)
        return opened[dtype]

    yield get
    for each in opened.values():
        with closing(each.engine):
            pass


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    off = torch.stack([f.float() - w.float() for f, w in zip(found, wanted, strict=True)])
    return float((off - off.mean(-1, keepdim=True)).square().mean().sqrt())


def test_in_float32_ratio_1_is_ordinary_prefill(open_model: Callable[[str], Opened]) -> None:
    opened = open_model("float32")
    for found, wanted in zip(opened.first_logits(), opened.own_logits(), strict=True):
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_in_float32_ratio_1_answers_as_the_models_own_forward_does(
    open_model: Callable[[str], Opened],
) -> None:
    opened = open_model("float32")
    model = opened.engine.model
    found = opened.engine.generate(opened.prompts[0], GREEDY)
    with torch.no_grad():
        assert list(found.token_ids) == own_tokens(model, opened.token_ids()[0], 8)


@pytest.mark.parametrize("dtype", LOW)
def test_in_16_bits_ratio_1_is_as_near_to_float32_as_the_model_itself(
    dtype: str, open_model: Callable[[str], Opened]
) -> None:
    wanted, opened = open_model("float32").own_logits(), open_model(dtype)
    own = error(opened.own_logits(), wanted)
    assert own > 0, "rounding must show"
    assert error(opened.first_logits(), wanted) <= FACTOR * own
