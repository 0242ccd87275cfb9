"""The form of a forced call, for any schema that a tool may have."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from cacheblend_rag import ChatPrompt, PromptError
from cacheblend_rag.engines.tool_use import call_form

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


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": []},
        {"$defs": [1, 2]},
        {"definitions": "abc"},
        {"properties": {"a": {"$ref": ["x"]}}},
        {"properties": {"a": {"type": "string", "minLength": "x"}}},
        {"properties": {"a": {"type": "array", "minItems": None}}},
    ],
    ids=str,
)
def test_a_malformed_schema_is_left_to_the_compiler(parameters: dict[str, Any]) -> None:
    schema = call_form([tool(parameters)], 64).schema
    for name, value in parameters.items():
        assert schema["$defs"]["arguments_0"][name] == value or name == "properties"


def test_a_name_that_stands_twice_among_many_is_found() -> None:
    tools = [tool({}, f"f{i}") for i in range(100_000)]
    with pytest.raises(PromptError, match="two functions of the name 'f7'"):
        ChatPrompt([{"role": "user", "content": "?"}], [*tools, tools[7]])
