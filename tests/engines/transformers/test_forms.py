"""The embedded engine holds answers to forms, and says what it cannot do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jsonschema
import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_rag import (
    ChatPrompt,
    ConfigError,
    MissingExtraError,
    SamplingParams,
    StructuredOutputs,
    TransformersEngine,
)
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.transformers.decoding import Sampler
from tests.engines.contract import CONFIG, joined
from tests.models import make_tokenizer
from tests.toy import TOY

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["person", "place"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "kind", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"floor": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["floor"],
        }
    },
}
REGEX = r"[A-Z][a-z]{2,5}( [0-9])?"
CHOICE = ("yes", 'no "thanks"')
GRAMMAR = 'start: "<n>" /[0-9]{1,2}/ "</n>"'
QUESTION = {"role": "user", "content": "Question: What is known about the mayor?\nAnswer:"}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a name up.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "times": {"enum": [1, 2]}},
            "required": ["name", "times"],
        },
    },
}
COUNT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"of": {"$ref": "#/$defs/what"}},
            "required": ["of"],
            "$defs": {"what": {"enum": ["ships", "lamps"]}},
        },
    },
}


def held(form: StructuredOutputs, tokens: int = 60, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, structured_outputs=form, **more)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    with closing(TransformersEngine(TOY, dtype="float32", config=CONFIG)) as engine:
        yield engine


def test_json_follows_the_schema(engine: TransformersEngine) -> None:
    form = StructuredOutputs(json=SCHEMA)
    for asked in (held(form), SamplingParams(max_tokens=60, temperature=1.5, seed=3,
                                             structured_outputs=form)):  # fmt: skip
        answer = engine.generate([QUESTION], asked)
        closed = {**SCHEMA, "additionalProperties": False}
        jsonschema.validate(json.loads(answer.text), closed)
        assert answer.finish_reason == "stop"
        parsed = json.loads(answer.text)
        styles = ((", ", ": "), (",", ":"))
        assert answer.text in {
            json.dumps(parsed, ensure_ascii=False, separators=style) for style in styles
        }
        again = engine.generate([QUESTION], held(StructuredOutputs(json=json.dumps(SCHEMA))))
        assert again.text == answer.text or asked.temperature


def test_texts_follow_their_form(engine: TransformersEngine) -> None:
    forms = {
        StructuredOutputs(regex=REGEX): REGEX,
        StructuredOutputs(choice=CHOICE): "|".join(map(re.escape, CHOICE)),
        StructuredOutputs(grammar=GRAMMAR): "<n>[0-9]{1,2}</n>",
    }
    for form, pattern in forms.items():
        answer = joined(engine.stream([QUESTION], held(form)))
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "no type"}},
        {"json": {"$ref": "#/nowhere"}},
        {"regex": "("},
        {"grammar": "start: ("},
        {"grammar": 'start: other\n"'},
    ],
    ids=str,
)
def test_a_wrong_form_is_refused(engine: TransformersEngine, form: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="structured_outputs is refused") as refused:
        engine.generate([QUESTION], held(StructuredOutputs(**form)))
    assert "\n" not in str(refused.value)


def test_a_required_call_is_made(engine: TransformersEngine) -> None:
    for choice, names in (
        ("required", {"look_up", "count"}),
        ({"type": "function", "function": {"name": "count"}}, {"count"}),
        ({"type": "function", "function": {"name": "look_up"}}, {"look_up"}),
    ):
        prompt = ChatPrompt([QUESTION], [LOOK, COUNT], choice)
        deltas = list(engine.stream(prompt, SamplingParams(max_tokens=96, temperature=0.0)))
        answer = joined(deltas)
        [call] = answer.tool_calls
        assert call.name in names
        schema = next(one for one in (LOOK, COUNT) if one["function"]["name"] == call.name)
        jsonschema.validate(json.loads(call.arguments), schema["function"]["parameters"])
        assert (answer.content, answer.finish_reason) == ("", "stop")
        assert "".join(delta.content for delta in deltas) == ""


def test_an_answer_without_calls_is_its_content(engine: TransformersEngine) -> None:
    for choice in ("auto", "none"):
        prompt = ChatPrompt([QUESTION], [LOOK], choice)
        deltas = list(engine.stream(prompt, SamplingParams(max_tokens=12, temperature=0.0)))
        answer = joined(deltas)
        assert (answer.content, answer.tool_calls) == (answer.text, ())
        assert "".join(delta.content for delta in deltas) == answer.text
    told = engine.prepare(ChatPrompt([QUESTION], [LOOK], "none"))
    assert told.token_ids == engine.prepare([QUESTION]).token_ids


def test_an_answer_may_be_a_call_or_in_the_form(engine: TransformersEngine) -> None:
    form = StructuredOutputs(json=SCHEMA)
    prompt = ChatPrompt([QUESTION], [COUNT])
    arguments = {"properties": {"of": {"enum": ["ships", "lamps"]}}, "required": ["of"]}
    call = {"properties": {"name": {"const": "count"}, "arguments": arguments}}
    answer_form = {**SCHEMA, "additionalProperties": False}
    for seed in range(4):
        asked = SamplingParams(max_tokens=96, temperature=1.5, seed=seed, structured_outputs=form)
        deltas = list(engine.stream(prompt, asked))
        answer = joined(deltas)
        assert answer.finish_reason == "stop"
        said = json.loads(answer.text)
        jsonschema.validate(said, call if "arguments" in said else answer_form)
        assert bool(answer.tool_calls) == ("arguments" in said)
        assert "".join(delta.content for delta in deltas) == answer.content
        assert answer.content == ("" if answer.tool_calls else answer.text)


def test_a_wrong_schema_of_a_tool_is_named_as_such(engine: TransformersEngine) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "no type"}}}
    with pytest.raises(ConfigError, match=r"^tools is refused: ") as refused:
        engine.generate(ChatPrompt([QUESTION], [wrong], "required"), SamplingParams(max_tokens=8))
    assert "\n" not in str(refused.value)
    form = StructuredOutputs(json=SCHEMA)
    with pytest.raises(ConfigError, match=r"^tools or structured_outputs is refused: "):
        engine.generate(ChatPrompt([QUESTION], [wrong]), held(form))


def test_without_llguidance_the_fix_is_named(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'cacheblend-rag\[structured\]'"):
        engine.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="never")))


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
