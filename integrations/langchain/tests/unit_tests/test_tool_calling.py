"""Tools and choices as the engine takes them, and calls as LangChain does."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from cacheblend_rag import ConfigError, ToolCall
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_cacheblend.tool_calling import (
    to_engine_tools,
    to_tool_call_chunks,
    to_tool_calls,
    to_tool_choice,
)


class Search(BaseModel):
    """Look passages up."""

    query: str = Field(description="what to look for")


class SearchDict(TypedDict):
    """Look passages up."""

    query: Annotated[str, ..., "what to look for"]


@tool
def search(query: Annotated[str, "what to look for"]) -> str:
    """Look passages up."""
    return query


PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "what to look for"}},
    "required": ["query"],
}
FUNCTION = {"name": "Search", "description": "Look passages up.", "parameters": PARAMETERS}


@pytest.mark.parametrize(
    "given",
    [
        Search,
        {"type": "function", "function": {**FUNCTION, "strict": True}},
        {"type": "function", **FUNCTION},
        {"name": "Search", "description": "Look passages up.", "input_schema": PARAMETERS},
        {"title": "Search", "description": "Look passages up.", **PARAMETERS},
    ],
)
def test_tools_of_every_form_are_openais(given: Any) -> None:
    assert to_engine_tools([given]) == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(("given", "name"), [(search, "search"), (SearchDict, "SearchDict")])
def test_functions_and_typed_dicts_are_described_by_their_hints(given: Any, name: str) -> None:
    assert to_engine_tools([given]) == [
        {"type": "function", "function": {**FUNCTION, "name": name}}
    ]


def test_strict_closes_a_tools_objects() -> None:
    (closed,) = to_engine_tools([Search], strict=True)
    assert closed["function"] == {
        **FUNCTION,
        "parameters": {**PARAMETERS, "additionalProperties": False},
    }


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("search", "tools is a str: give a list"),
        ([search, 3], "tools[1] is a int that describes no function"),
        ([{"type": "web_search"}], "tools[0] is of type 'web_search': give a function to call"),
        ([{"type": "object", "properties": {}}], "tools[0] is a dict that describes no function"),
    ],
)
def test_what_is_no_tool_is_named_in_a_line(tools: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        to_engine_tools(tools)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


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
def test_tool_choices_are_the_engines(given: Any, choice: Any) -> None:
    assert to_tool_choice(given, to_engine_tools([search])) == choice


def test_a_tool_may_have_the_name_of_a_choice() -> None:
    tools = to_engine_tools([{"name": "any", "parameters": PARAMETERS}])
    assert to_tool_choice("any", tools) == {"type": "function", "function": {"name": "any"}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("serch", "tool_choice='serch' is no tool: the tools are 'search'"),
        ({"function": {"name": "x"}}, "tool_choice='x' is no tool"),
        ({"type": "any"}, "tool_choice={'type': 'any'} must be 'auto'"),
        (3, "tool_choice=3 must be"),
    ],
)
def test_a_wrong_tool_choice_is_named_in_a_line(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        to_tool_choice(given, to_engine_tools([search]))
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


def test_calls_whose_arguments_are_no_object_are_invalid() -> None:
    calls = [
        ToolCall("1", "search", '{"query": "río"}'),
        ToolCall("2", "search", '{"query": '),
        ToolCall("3", "search", '["río"]'),
    ]
    valid, invalid = to_tool_calls(calls)
    assert valid == [{"name": "search", "args": {"query": "río"}, "id": "1", "type": "tool_call"}]
    assert [(call["id"], call["args"]) for call in invalid] == [
        ("2", '{"query": '),
        ("3", '["río"]'),
    ]
    assert "are not JSON" in str(invalid[0]["error"])
    assert invalid[1]["error"] == "the arguments are no JSON object"
    calls.append(ToolCall("4", "add", '{"a": 1}'))
    assert [(one["index"], one["name"], one["args"]) for one in to_tool_call_chunks(calls)] == [
        (0, "search", '{"query": "río"}'),
        (1, "add", '{"a": 1}'),
    ], "LangChain would complete and run what is cut off"
