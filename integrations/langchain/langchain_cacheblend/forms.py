"""Tools, and the forms of answers, as an engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cacheblend_rag import ConfigError, StructuredOutputs
from langchain_core.utils.function_calling import (
    convert_to_openai_function,
    convert_to_openai_tool,
)

Tool = dict[str, Any]
KNOWN = ("name", "description", "parameters")
"""What a tool in the OpenAI form says of its function."""
ANSWER = "answer"
"""The name of a form that has none."""
FORMATS = (
    "{'type': 'text'}, {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': {'name': "
    "..., 'schema': ...}}, a Pydantic class, a TypedDict or a JSON schema"
)


def to_engine_tools(tools: Any, strict: bool | None = None) -> list[Tool]:
    """Return tools in the OpenAI form.

    Args:
        tools: functions, BaseTools, Pydantic classes, TypedDicts, or dicts of any form that
            ``convert_to_openai_tool`` reads.
        strict: True closes the objects of their schemas, as in ``convert_to_openai_tool``.

    Raises:
        ConfigError: in one line that names the tool, when one is no function.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools is a {type(tools).__name__}: give a list of functions or tools")
    return [_to_engine_tool(tool, f"tools[{index}]", strict) for index, tool in enumerate(tools)]


def _to_engine_tool(tool: Any, name: str, strict: bool | None) -> Tool:
    try:
        found = convert_to_openai_tool(tool, strict=strict)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{name} is a {type(tool).__name__} that describes no function: give a tool, a "
            "function with a docstring, a Pydantic class, or a dict with name and parameters"
        ) from error
    if found.get("type") != "function":
        raise ConfigError(f"{name} is of type {found.get('type')!r:.40}: give a function to call")
    function = found.get("function", found)
    return {
        "type": "function",
        "function": {key: function[key] for key in KNOWN if key in function},
    }


def to_response_format(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return a ``response_format`` in the OpenAI form.

    Args:
        schema: one already, its inner ``{"name": ..., "schema": ...}``, a Pydantic class, a
            TypedDict or a JSON schema.
        strict: True closes the schema's objects, as in ``convert_to_openai_function``.

    Raises:
        ConfigError: when it is none of them.
    """
    if isinstance(schema, Mapping):
        if schema.get("type") in ("text", "json_object", "json_schema"):
            StructuredOutputs.of_response_format(schema)
            return dict(schema)
        if "name" in schema and "schema" in schema:
            return {"type": "json_schema", "json_schema": dict(schema)}
        if "name" not in schema and "title" not in schema:
            schema = {"title": ANSWER, **schema}
    try:
        function = convert_to_openai_function(schema, strict=strict)
        named = {"name": function["name"], "schema": function["parameters"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"response_format={schema!r:.80} must be {FORMATS}") from error
    return {"type": "json_schema", "json_schema": named}
