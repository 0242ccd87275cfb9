"""Messages and tools in the OpenAI form, and the calls that an answer makes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cacheblend_rag.errors import PromptError

Message: TypeAlias = Mapping[str, Any]
Tool: TypeAlias = Mapping[str, Any]
ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as an answer makes it.

    Args:
        id: names the call; the message with its result repeats it as ``tool_call_id``.
        name: of the tool.
        arguments: JSON text of an object.
    """

    id: str
    name: str
    arguments: str


def check_tools(tools: object) -> tuple[Tool, ...]:
    """Return tools as a tuple; raises PromptError when one is malformed or named twice."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise PromptError(f"tools must be a list of {{'type': 'function', ...}}, not {tools!r:.40}")
    names = [_checked_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise PromptError(f"tools has two functions of the name {twice!r}: rename one")
    return tuple(tools)


def check_choice(choice: object, tools: Sequence[Tool]) -> None:
    """Raise PromptError unless a ``tool_choice`` is one, and names one of the tools."""
    if choice in ("auto", "none"):
        return
    if choice == "required":
        if not tools:
            raise PromptError("tool_choice='required' needs tools: give at least one")
        return
    name = named_tool(choice)
    if name is None:
        raise PromptError(
            f"tool_choice={choice!r:.80} must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    if name not in map(tool_name, tools):
        raise PromptError(f"tool_choice names {name!r:.80}, which is not among the tools")


def named_tool(choice: object) -> str | None:
    """Return the name of the tool that a ``tool_choice`` asks for, None for the words."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def tool_name(tool: Tool) -> str:
    """Return the name of a checked tool."""
    return str(tool["function"]["name"])


def _checked_name(tool: object, where: str) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise PromptError(f"{where}.type must be 'function'")
    if not isinstance(function, Mapping):
        raise PromptError(f"{where}.function must be {{'name': ..., 'parameters': ...}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PromptError(
            f"{where}.function.name must be letters, digits or _.:-, not {name!r:.40}"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise PromptError(f"{where}.function.parameters must be a JSON schema, a mapping")
    return name
