"""Tools as an engine takes them, and the calls of its answers as LangChain's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cacheblend_rag import ConfigError, ToolCall
from langchain_core.messages import InvalidToolCall, ToolCallChunk
from langchain_core.messages import ToolCall as LangChainToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

Choice = Literal["auto", "none", "required"] | dict[str, Any]
WORDS: dict[str, Choice] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}
"""LangChain's words for how tools are chosen, and the engine's."""
Tool = dict[str, Any]


def to_engine_tools(tools: Any, strict: bool | None = None) -> list[Tool]:
    """Return tools in the OpenAI form.

    Args:
        tools: functions, BaseTools, Pydantic classes, TypedDicts, or dicts of any form that
            ``convert_to_openai_tool`` reads; a tool in the OpenAI form is returned as it is.
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
    known = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {key: function[key] for key in known if key in function},
    }


def to_tool_choice(choice: Any, tools: Sequence[Tool]) -> Choice:
    """Return ``tool_choice`` as the engine takes it.

    Args:
        choice: ``auto``, ``none``, ``any``, ``required``, a tool's name, a dict that names one,
            True (as ``any``), or None or False (as ``auto``).
        tools: what it chooses from.

    Raises:
        ConfigError: when it is none of them, or there is no such tool.
    """
    if choice is None or choice is False:
        return "auto"
    if choice is True:
        return "required"
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, str):
        if choice not in names and choice in WORDS:
            return WORDS[choice]
        name = choice
    elif (found := _named(choice)) is not None:
        name = found
    else:
        raise ConfigError(
            f"tool_choice={choice!r:.80} must be 'auto', 'none', 'any', a tool's name or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    if name not in names:
        told = ", ".join(map(repr, names)) or "none"
        raise ConfigError(f"tool_choice={name!r:.80} is no tool: the tools are {told}")
    return {"type": "function", "function": {"name": name}}


def _named(choice: object) -> str | None:
    """Return the name of the tool that a dict chooses, as OpenAI's or Anthropic's API writes it."""
    if not isinstance(choice, Mapping):
        return None
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def to_tool_calls(
    calls: Sequence[ToolCall],
) -> tuple[list[LangChainToolCall], list[InvalidToolCall]]:
    """Return an answer's tool calls, and those whose arguments are no JSON object."""
    valid: list[LangChainToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments)
            error = None if isinstance(arguments, dict) else "the arguments are no JSON object"
        except ValueError as found:
            arguments, error = None, f"the arguments are not JSON: {found}"
        if error is None:
            valid.append(tool_call(name=call.name, args=arguments, id=call.id))
        else:
            told = invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=error)
            invalid.append(told)
    return valid, invalid


def to_tool_call_chunks(calls: Sequence[ToolCall]) -> list[ToolCallChunk]:
    """Return an answer's tool calls as they stand in the last piece of a stream.

    One whose arguments are cut off is left out: LangChain would complete it, and run it.
    """
    whole, _ = to_tool_calls(calls)
    texts = [json.dumps(call["args"], ensure_ascii=False) for call in whole]
    return [
        tool_call_chunk(name=call["name"], args=text, id=call["id"], index=index)
        for index, (call, text) in enumerate(zip(whole, texts, strict=True))
    ]
