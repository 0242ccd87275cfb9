"""The form of a forced call, for any schema that a tool may have."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from cacheblend_rag import ChatPrompt, ConfigError, PromptError, StructuredOutputs
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.tool_use import ToolUse, call_form, read_tool_choice
from tests.tokenizer_kinds import tokenizer_of

DEFINED: dict[str, Any] = {
    "Unit": {"enum": ["C", "F"]},
    "a/b": {"type": "object", "properties": {"x": {"type": "integer"}}},
}


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (
            {"properties": {"u": {"allOf": [{"$ref": "#/$defs/Unit"}]}}, "$defs": DEFINED},
            {"u": "C"},
            {"u": "K"},
        ),
        (
            {"properties": {"u": {"$ref": "#/definitions/Unit"}}, "definitions": DEFINED},
            {"u": "F"},
            {"u": 1},
        ),
        (
            {"properties": {"u": {"$ref": "#/$defs/a~1b/properties/x"}}, "$defs": DEFINED},
            {"u": 1},
            {"u": "C"},
        ),
        (
            {"properties": {"u": {"$ref": "#/properties/v"}, "v": {"type": "boolean"}}},
            {"u": True},
            {"u": 1},
        ),
        (
            {"properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
            {"kids": [{"kids": []}]},
            {"kids": [{"kids": 1}]},
        ),
    ],
)
def test_references_of_a_tools_schema_hold_in_the_form(
    parameters: dict[str, Any], right: Any, wrong: Any
) -> None:
    other = tool({"properties": {"u": {"type": "null"}}, "$defs": {"Unit": {}}}, "g")
    form = jsonschema.Draft202012Validator(call_form([other, tool(parameters)], 64).schema)
    assert form.is_valid({"name": "f", "arguments": right})
    assert not form.is_valid({"name": "f", "arguments": wrong})


def test_an_answer_may_stand_in_place_of_a_call() -> None:
    """References of either hold, and what names a document does not."""
    answer = StructuredOutputs(
        json={
            "$id": "https://example.org/answer",
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"u": {"$ref": "#/$defs/Unit"}, "kids": {"items": {"$ref": "#"}}},
            "required": ["u"],
            "$defs": DEFINED,
        }
    )
    parameters = {
        "properties": {"u": {"$ref": "#/$defs/Unit"}},
        "$defs": {"Unit": {"type": "null"}},
    }
    form = jsonschema.Draft202012Validator(call_form([tool(parameters)], 64, answer).schema)
    for right in (
        {"u": "C"},
        {"u": "F", "kids": [{"u": "C"}]},
        {"name": "f", "arguments": {"u": None}},
    ):
        assert form.is_valid(right)
    for wrong in ({"u": None}, {"u": "F", "kids": [{}]}, {"name": "f", "arguments": {"u": "C"}}, 7):
        assert not form.is_valid(wrong)
    anything = call_form([tool({})], 64, StructuredOutputs(json="true")).schema
    assert jsonschema.Draft202012Validator(anything).is_valid(7)


def test_a_mark_that_decoding_leaves_out_begins_a_call_in_streams_as_well() -> None:
    tokenizer: Any = copy.deepcopy(tokenizer_of("byte-level"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    asked = ChatPrompt([{"role": "user", "content": "?"}], [tool({})])
    use = ToolUse(asked, ResolvedSampling(), tokenizer)
    stream, ids, shown = use.content_stream(), [], ""
    for piece in ("So: ", "[TOOL_CALLS]", 'f{"a', '": 1}'):
        new = tokenizer.encode(piece, add_special_tokens=False)
        ids += new
        text = tokenizer.decode(new, skip_special_tokens=True)
        shown += stream.feed(text, is_call=use.hides_mark(new))
    content, calls = use.read(tokenizer.decode(ids, skip_special_tokens=True), ids)
    assert (shown, shown + stream.finish(content), content) == ("So:",) * 3
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f', []),
        ('{"name": "f", "argu', [("f", "")]),
        ('{"name": "f", "arguments": {"u": "C"}', [("f", '{"u": "C"}')]),
    ],
)
def test_a_call_that_must_be_made_and_is_cut_is_no_text(
    text: str, calls: list[tuple[str, str]]
) -> None:
    asked = ChatPrompt([{"role": "user", "content": "?"}], [tool({})], "required")
    content, found = ToolUse(asked, ResolvedSampling(), tokenizer_of("byte-level")).read(text, ())
    assert content == ""
    assert [(call.name, call.arguments) for call in found] == calls


def test_a_deep_schema_is_refused_by_its_tool() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ConfigError, match=r"^tools\[1\].function.parameters has more than 64"):
        call_form([tool({}), tool(deep, "g")], 64)
    with pytest.raises(ConfigError, match=r"^structured_outputs.json has more than 64 levels"):
        StructuredOutputs(json=deep)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "json_schema"}, "response_format.json_schema.schema is missing: give a JSON"),
        ({"type": "xml"}, "response_format={'type': 'xml'} must be {'type': 'text'}"),
        (None, "response_format=None must be"),
    ],
)
def test_a_wrong_response_format_is_named(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StructuredOutputs.of_response_format(given)
    assert str(raised.value).startswith(told)


NAMED = {"type": "function", "function": {"name": "search"}}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, "auto"),
        (False, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ("required", "required"),
        (True, "required"),
        ("search", NAMED),
        (NAMED, NAMED),
        ({"type": "tool", "name": "search"}, NAMED),
    ],
)
def test_a_choice_of_any_library_is_openais(given: Any, choice: Any) -> None:
    assert read_tool_choice(given, [{"type": "function", "function": {"name": "search"}}]) == choice


@pytest.mark.parametrize("given", ["serch", {"function": {"name": "x"}}, {"type": "any"}, 3])
def test_what_is_no_choice_is_refused(given: Any) -> None:
    with pytest.raises(PromptError, match="tool_choice"):
        read_tool_choice(given, [NAMED])
