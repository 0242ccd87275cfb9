"""Forms of answers as the engine takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cacheblend_rag import ConfigError, StructuredOutputs
from pydantic import BaseModel
from typing_extensions import TypedDict

from langchain_cacheblend import ChatCacheBlend
from langchain_cacheblend.structured_output import (
    to_response_format,
    to_structured_outputs,
)


class Place(BaseModel):
    """Where something is."""

    town: str


class PlaceDict(TypedDict):
    """Where something is."""

    town: str


SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
NAMED = {"name": "Place", "schema": SCHEMA, "description": "Where something is."}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (Place, "Place"),
        (PlaceDict, "PlaceDict"),
        ({"title": "Place", "description": "Where something is.", **SCHEMA}, "Place"),
        (NAMED, "Place"),
        ({"type": "json_schema", "json_schema": {**NAMED, "strict": True}}, "Place"),
    ],
)
def test_schemas_of_every_form_are_openais_response_format(given: Any, name: str) -> None:
    assert to_response_format(given) == {
        "type": "json_schema",
        "json_schema": {**NAMED, "name": name},
    }


def test_a_schema_needs_no_title() -> None:
    assert to_response_format(SCHEMA)["json_schema"] == {"name": "answer", "schema": SCHEMA}


def test_strict_closes_a_schemas_objects() -> None:
    closed = to_response_format(Place, strict=True)["json_schema"]["schema"]
    assert closed == {**SCHEMA, "additionalProperties": False}


@pytest.mark.parametrize(
    ("form", "response_format", "asked"),
    [
        (None, None, None),
        (None, {"type": "text"}, None),
        (None, {"type": "json_object"}, StructuredOutputs(json_object=True)),
        (None, NAMED, StructuredOutputs(json=SCHEMA)),
        ({"choice": ["yes", "no"]}, None, StructuredOutputs(choice=["yes", "no"])),
        (StructuredOutputs(regex="a+"), None, StructuredOutputs(regex="a+")),
    ],
)
def test_forms_are_the_engines(form: Any, response_format: Any, asked: Any) -> None:
    assert to_structured_outputs(form, response_format) == asked


@pytest.mark.parametrize(
    ("form", "response_format", "told"),
    [
        ({"regex": "a"}, Place, "structured_outputs and response_format both say the form"),
        ({"regx": "a"}, None, "structured_outputs.regx is unknown: give one of"),
        ({"regex": "a", "choice": ["b"]}, None, "structured_outputs needs exactly one of"),
        ("json", None, "structured_outputs is a str: give StructuredOutputs"),
        (None, "json", "response_format='json' must be {'type': 'text'}"),
        (None, {"type": "json_schema"}, "response_format.json_schema must be"),
        (None, {"type": "structural_tag"}, "response_format='structural_tag' must be"),
    ],
)
def test_a_wrong_form_is_named_in_a_line(form: Any, response_format: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        to_structured_outputs(form, response_format)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "method", "told"),
    [
        (Place, "jason", "method='jason' must be one of json_schema, function_calling, json_mode"),
        (None, "json_schema", "schema must be given with method='json_schema'"),
        (3, "json_schema", "response_format=3 must be"),
        (3, "function_calling", "tools[0] is a int"),
    ],
)
def test_a_wrong_schema_is_named_before_anything_is_loaded(
    schema: Any, method: str, told: str
) -> None:
    llm = ChatCacheBlend(model="no-such-model")
    with pytest.raises(ConfigError) as raised:
        llm.with_structured_output(schema, method=method)
    assert str(raised.value).startswith(told)


def test_what_is_bound_is_plain_json() -> None:
    bound: Any = ChatCacheBlend(model="no-such-model").bind_tools(
        [Place], tool_choice="any", response_format=Place, parallel_tool_calls=False
    )
    assert set(bound.kwargs) == {"tools", "tool_choice", "response_format", "parallel_tool_calls"}
    assert json.loads(json.dumps(bound.kwargs)) == bound.kwargs
