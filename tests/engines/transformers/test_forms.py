"""The embedded engine holds answers to forms, and says what it cannot do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_rag import (
    ConfigError,
    MissingExtraError,
    SamplingParams,
    StructuredOutputs,
    TransformersEngine,
)
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.transformers.decoding import Sampler
from tests.engines.contract import CONFIG
from tests.engines.forms_contract import QUESTION, REGEX, FormsContract
from tests.models import make_tokenizer
from tests.toy import TOY


@pytest.fixture(scope="module")
def demo() -> Iterator[TransformersEngine]:
    with closing(TransformersEngine(TOY, dtype="float32", config=CONFIG)) as engine:
        yield engine


class TestForms(FormsContract):
    @pytest.fixture
    def engine(self, demo: TransformersEngine) -> TransformersEngine:
        return demo


def test_many_answers_at_once_keep_their_own_form(demo: TransformersEngine) -> None:
    def asked(i: int) -> str:
        form = StructuredOutputs(regex=f"{i}[a-c]{{3}}")
        return demo.generate([QUESTION], SamplingParams(max_tokens=9, structured_outputs=form)).text

    with ThreadPoolExecutor(6) as pool:
        assert [text[0] for text in pool.map(asked, range(6))] == list("012345")


def test_without_llguidance_the_fix_is_named(
    demo: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'cacheblend-rag\[structured\]'"):
        demo.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="never")))


def test_a_tokenizer_that_cannot_be_read_is_refused(model: PreTrainedModel) -> None:
    engine = TransformersEngine(model, tokenizer=make_tokenizer(), config=CONFIG)
    form = StructuredOutputs(regex=REGEX)
    with closing(engine), pytest.raises(ConfigError, match="needs a tokenizer that llguidance can"):
        engine.generate("w5 w6", SamplingParams(structured_outputs=form))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, not none"),
        ({"json": {}, "regex": "a"}, "not json and regex"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": [1]}, "structured_outputs.json must be a JSON schema"),
        ({"json": {"a": {1}}}, "structured_outputs.json is not JSON"),
        ({"choice": "yes"}, "structured_outputs.choice must be a non-empty list"),
        ({"choice": [""]}, "structured_outputs.choice must hold non-empty"),
        ({"regex": ""}, "structured_outputs.regex must be a non-empty string"),
        ({"json_object": 1}, "structured_outputs.json_object must be true"),
    ],
)
def test_a_malformed_form_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StructuredOutputs(**fields)


def test_penalties_are_those_of_openai() -> None:
    logits = torch.tensor([[1.0, 1.1, 1.2, 0.0]])
    sampling = ResolvedSampling(presence_penalty=0.05, frequency_penalty=0.1)
    prompt, sampler = [3, 2, 2], Sampler(sampling, torch.device("cpu"), prompt_tokens=3)
    drawn = []
    for _ in range(4):
        drawn.append(sampler.draw(logits, [*prompt, *drawn])[0])
    # 1.2, then 1.2 - 0.15 < 1.1, then 1.1 - 0.15 < 1.2 - 0.15, then 1.2 - 0.25 < 1.0
    assert drawn == [2, 1, 2, 0]
