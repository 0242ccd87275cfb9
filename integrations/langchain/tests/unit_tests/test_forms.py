"""Tools and forms of answers as the engine takes them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from cacheblend_rag import CacheBlendError
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_cacheblend import ChatCacheBlend
from langchain_cacheblend.messages import to_engine_tools, to_response_format


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


SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "what to look for"}},
    "required": ["query"],
}
FUNCTION = {"name": "Search", "description": "Look passages up.", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (Search, "Search"),
        (search, "search"),
        (SearchDict, "SearchDict"),
        ({"type": "function", "function": {**FUNCTION, "strict": True}}, "Search"),
        ({"name": "Search", "description": "Look passages up.", "input_schema": SCHEMA}, "Search"),
    ],
)
def test_tools_of_every_form_are_openais(given: Any, name: str) -> None:
    assert to_engine_tools([given]) == [
        {"type": "function", "function": {**FUNCTION, "name": name}}
    ]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (Search, "Search"),
        (SearchDict, "SearchDict"),
        (SCHEMA, "answer"),
        ({"name": "Search", "schema": SCHEMA}, "Search"),
        ({"type": "json_schema", "json_schema": {"name": "Search", "schema": SCHEMA}}, "Search"),
    ],
)
def test_schemas_of_every_form_are_openais(given: Any, name: str) -> None:
    told = {"name": name, "schema": SCHEMA}
    assert to_response_format(given) == {"type": "json_schema", "json_schema": told}


def test_strict_closes_objects() -> None:
    closed = {**SCHEMA, "additionalProperties": False}
    assert to_engine_tools([Search], strict=True)[0]["function"]["parameters"] == closed
    assert to_response_format(Search, strict=True)["json_schema"]["schema"] == closed


@pytest.mark.parametrize(
    ("tools", "options", "told"),
    [
        ("search", {}, "tools is a str: give a list"),
        ([search, 3], {}, "tools[1] is a int that describes no function"),
        ([{"type": "web_search"}], {}, "tools[0] is of type 'web_search': give a function to call"),
        ([search], {"tool_choice": "serch"}, "tool_choice names 'serch'"),
        ([search], {"tool_choice": {"type": "any"}}, "tool_choice={'type': 'any'} must be 'auto'"),
        ([search], {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_is_no_tool_choice_or_form_is_named_in_a_line(
    tools: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(CacheBlendError) as raised:
        ChatCacheBlend(model="no-such-model").bind_tools(tools, **options)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "method", "told"),
    [
        (Search, "jason", "method='jason' must be one of json_schema, function_calling, json_mode"),
        (None, "json_schema", "schema must be given with method='json_schema'"),
        (3, "json_schema", "response_format=3 must be"),
    ],
)
def test_a_wrong_schema_is_named_before_anything_is_loaded(
    schema: Any, method: str, told: str
) -> None:
    with pytest.raises(CacheBlendError) as raised:
        ChatCacheBlend(model="no-such-model").with_structured_output(schema, method=method)
    assert str(raised.value).startswith(told)


def test_what_is_bound_is_plain_json() -> None:
    bound: Any = ChatCacheBlend(model="no-such-model").bind_tools(
        [Search], tool_choice="any", response_format=Search, parallel_tool_calls=False
    )
    assert bound.kwargs["tool_choice"] == "required"
    assert json.loads(json.dumps(bound.kwargs)) == bound.kwargs
