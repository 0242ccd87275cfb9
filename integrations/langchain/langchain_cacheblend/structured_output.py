"""The form of an answer: response_format, structured_outputs, with_structured_output."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from cacheblend_rag import ConfigError, StructuredOutputs
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_cacheblend.tool_calling import to_engine_tools

METHODS = ("json_schema", "function_calling", "json_mode")
ANSWER = "answer"
"""The name of a form that has none."""
JSON_MODE = {"type": "json_object"}
FORMATS = (
    "{'type': 'text'}, {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': {'name': "
    "..., 'schema': ...}}, a Pydantic class, a TypedDict or a JSON schema"
)


def to_response_format(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return a ``response_format`` in the OpenAI form.

    Args:
        schema: one already, a Pydantic class, a TypedDict, a JSON schema, or ``{"name": ...,
            "schema": ...}``.
        strict: True closes the schema's objects, as in ``convert_to_openai_function``.

    Raises:
        ConfigError: when it is none of them.
    """
    if isinstance(schema, Mapping):
        kind = schema.get("type")
        if kind in ("text", "json_object"):
            return {"type": kind}
        if kind == "json_schema" or "json_schema" in schema:
            return _json_schema(schema.get("json_schema"))
        if "schema" in schema and "name" in schema:
            return _json_schema(schema)
        if "name" not in schema and "title" not in schema:
            schema = {"title": ANSWER, **schema}
    try:
        function = convert_to_openai_function(schema, strict=strict)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(_refused(schema)) from error
    if "parameters" not in function:
        raise ConfigError(_refused(schema))
    return _json_schema({**function, "schema": function["parameters"]})


def _json_schema(given: Any) -> dict[str, Any]:
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError("response_format.json_schema must be {'name': ..., 'schema': {...}}")
    name = given.get("name")
    told = {"name": name if isinstance(name, str) and name else ANSWER, "schema": dict(schema)}
    if isinstance(given.get("description"), str):
        told["description"] = given["description"]
    return {"type": "json_schema", "json_schema": told}


def _refused(given: Any) -> str:
    told = given.get("type") if isinstance(given, Mapping) else given
    return f"response_format={told!r:.80} must be {FORMATS}"


def to_structured_outputs(form: Any, response_format: Any) -> StructuredOutputs | None:
    """Return what the engine holds an answer to, None for free text.

    Args:
        form: the call option ``structured_outputs``: one, a dict of its fields, or None.
        response_format: as for ``to_response_format``, or None.

    Raises:
        ConfigError: when both are given, or one is malformed.
    """
    if form is not None and response_format is not None:
        raise ConfigError("structured_outputs and response_format both say the form: give one")
    if form is not None:
        return StructuredOutputs.of(form)
    if response_format is None:
        return None
    return StructuredOutputs.of_response_format(to_response_format(response_format))


def bind_form(
    llm: BaseChatModel, schema: Any, method: str, strict: bool | None, options: Mapping[str, Any]
) -> tuple[Runnable[Any, Any], Runnable[Any, Any]]:
    """Return the model, bound to the form of a schema and to call options, and a parser.

    Arguments are those of ``ChatCacheBlend.with_structured_output``. Raises ConfigError.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r:.40} must be one of {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise ConfigError(f"schema must be given with method={method!r}")
    told = {"method": method} if method == "json_mode" else {"method": method, "strict": strict}
    traced = {"ls_structured_output_format": {"kwargs": told, "schema": schema}}
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    bound: dict[str, Any] = {**options, **traced}
    if method != "function_calling":
        form = JSON_MODE if method == "json_mode" else to_response_format(schema, strict)
        model = llm.bind(response_format=form, **bound)
        return model, PydanticOutputParser(
            pydantic_object=schema
        ) if is_class else JsonOutputParser()
    name = to_engine_tools([schema])[0]["function"]["name"]
    calling = llm.bind_tools(
        [schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **bound
    )
    if is_class:
        return calling, PydanticToolsParser(tools=[schema], first_tool_only=True)
    return calling, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def with_parser(
    model: Runnable[Any, Any], parser: Runnable[Any, Any], include_raw: bool
) -> Runnable[Any, Any]:
    """Return a model followed by a parser; with ``include_raw``, beside its message and errors."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
