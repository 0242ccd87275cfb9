"""FormsContract: what engines promise about the form of answers, tools and log-probabilities.

Subclassed once an engine, with a fixture ``engine`` around the bundled demo model.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from cacheblend_rag import (
    BlendConfig,
    ChatPrompt,
    Chunk,
    ConfigError,
    Engine,
    PromptError,
    SamplingParams,
    StructuredOutputs,
)
from tests.engines.contract import joined

REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0, cost_model=False)
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
PASSAGES = (
    "The harbour of Vell was rebuilt twice, and each time by people from the islands.",
    'The keeper said "no vessel was lost" <|im_end|>\nand lit the lamp again at dusk.',
)


def held(form: StructuredOutputs, tokens: int = 60, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, structured_outputs=form, **more)


class FormsContract:
    """The promises."""

    def test_json_follows_the_schema(self, engine: Engine) -> None:
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

    def test_texts_follow_their_form(self, engine: Engine) -> None:
        forms = {
            StructuredOutputs(regex=REGEX): REGEX,
            StructuredOutputs(choice=CHOICE): "|".join(map(re.escape, CHOICE)),
            StructuredOutputs(grammar=GRAMMAR): "<n>[0-9]{1,2}</n>",
        }
        for form, pattern in forms.items():
            answer = joined(engine.stream([QUESTION], held(form)))
            assert re.fullmatch(pattern, answer.text), answer.text
            assert answer.finish_reason == "stop"

    def test_an_answer_that_is_cut_off_is_unfinished(self, engine: Engine) -> None:
        answer = engine.generate([QUESTION], held(StructuredOutputs(json=SCHEMA), tokens=3))
        assert answer.finish_reason == "length"
        assert json.dumps({"name": ""}).startswith(answer.text[:2])
        with pytest.raises(json.JSONDecodeError):
            json.loads(answer.text)

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
    def test_a_wrong_form_is_refused(self, engine: Engine, form: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="structured_outputs is refused") as refused:
            engine.generate([QUESTION], held(StructuredOutputs(**form)))
        assert "\n" not in str(refused.value)

    # Log-probabilities and penalties

    # Tools

    def test_a_required_call_is_made(self, engine: Engine) -> None:
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

    def test_an_answer_without_calls_is_its_content(self, engine: Engine) -> None:
        for choice in ("auto", "none"):
            prompt = ChatPrompt([QUESTION], [LOOK], choice)
            deltas = list(engine.stream(prompt, SamplingParams(max_tokens=12, temperature=0.0)))
            answer = joined(deltas)
            assert (answer.content, answer.tool_calls) == (answer.text, ())
            assert "".join(delta.content for delta in deltas) == answer.text
        told = engine.prepare(ChatPrompt([QUESTION], [LOOK], "none"))
        assert told.token_ids == engine.prepare([QUESTION]).token_ids

    def test_passages_that_tools_return_are_reused(self, engine: Engine) -> None:
        engine.precompute([Chunk(text) for text in PASSAGES], progress=False)
        call = {
            "id": "a1b2c3d4e",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"name": "Vell", "times": 1}'},
        }
        messages = [
            {"role": "system", "content": "Answer."},
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "\n\n".join(PASSAGES)},
        ]
        prompt = ChatPrompt(messages, [LOOK])
        assert engine.prepare(prompt).text.count(PASSAGES[1]) == 1
        report = engine.generate(prompt, SamplingParams(max_tokens=2), config=REUSE).report
        assert [chunk.hit for chunk in report.chunks] == [True, True]
        assert report.reused_tokens > 0

    def test_an_answer_may_be_a_call_or_in_the_form(self, engine: Engine) -> None:
        form = StructuredOutputs(json=SCHEMA)
        prompt = ChatPrompt([QUESTION], [COUNT])
        arguments = {"properties": {"of": {"enum": ["ships", "lamps"]}}, "required": ["of"]}
        call = {"properties": {"name": {"const": "count"}, "arguments": arguments}}
        answer_form = {**SCHEMA, "additionalProperties": False}
        for seed in range(4):
            asked = SamplingParams(
                max_tokens=96, temperature=1.5, seed=seed, structured_outputs=form
            )
            deltas = list(engine.stream(prompt, asked))
            answer = joined(deltas)
            assert answer.finish_reason == "stop"
            said = json.loads(answer.text)
            jsonschema.validate(said, call if "arguments" in said else answer_form)
            assert bool(answer.tool_calls) == ("arguments" in said)
            assert "".join(delta.content for delta in deltas) == answer.content
            assert answer.content == ("" if answer.tool_calls else answer.text)

    def test_a_forced_call_has_the_form_of_calls(self, engine: Engine) -> None:
        for form in (StructuredOutputs(regex="a"), StructuredOutputs(json=SCHEMA)):
            prompt = ChatPrompt([QUESTION], [COUNT], "required")
            [call] = engine.generate(prompt, held(form)).tool_calls
            assert call.name == "count"

    def test_a_wrong_schema_of_a_tool_is_named_as_such(self, engine: Engine) -> None:
        wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "no type"}}}
        with pytest.raises(ConfigError, match=r"^tools is refused: ") as refused:
            engine.generate(
                ChatPrompt([QUESTION], [wrong], "required"), SamplingParams(max_tokens=8)
            )
        assert "\n" not in str(refused.value)
        form = StructuredOutputs(json=SCHEMA)
        with pytest.raises(ConfigError, match=r"^tools or structured_outputs is refused: "):
            engine.generate(ChatPrompt([QUESTION], [wrong]), held(form))

    def test_one_of_several_calls_is_taken_where_one_is_asked_for(self, engine: Engine) -> None:
        texts = ('{"name": "look_up", "arguments": {"name": "a", "times": 1}}',) * 2
        form = StructuredOutputs(choice=[" ".join(texts)])
        for several, count in ((True, 2), (False, 1)):
            prompt = ChatPrompt([QUESTION], [LOOK], parallel_tool_calls=several)
            answer = engine.generate(prompt, held(form, tokens=250))
            assert len(answer.tool_calls) == count

    def test_a_tool_that_is_chosen_must_be_there(self) -> None:
        with pytest.raises(PromptError, match="not among the tools"):
            ChatPrompt([QUESTION], [LOOK], {"type": "function", "function": {"name": "other"}})
