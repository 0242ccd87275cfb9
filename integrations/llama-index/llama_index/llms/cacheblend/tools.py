"""Tools of a chat: what the model is told of them, and which of them an answer calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools.types import BaseTool

from cacheblend_rag import ConfigError
from llama_index.llms.cacheblend.messages import TOOL_CALLS

WORDS = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Args:
        tools: in the OpenAI form.
        choice: ``auto``, ``none``, ``required`` or the function to call, in the OpenAI form.
        parallel: whether an answer may call several at once.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: Any = "auto"
    parallel: bool = True

    @classmethod
    def of(
        cls,
        tools: Sequence[BaseTool | Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        tool_required: bool = False,
        parallel_tool_calls: bool = True,
    ) -> ToolUse:
        """Return the tools of a call's arguments; without tools, nothing is chosen.

        Args:
            tools: LlamaIndex's, or in the OpenAI form.
            tool_choice: as ``choice``, or a tool's name.
            tool_required: whether one must be called, if no choice is given.
            parallel_tool_calls: as ``parallel``.

        Raises:
            ConfigError: when tools are no list of tools.
        """
        if isinstance(tools, str | Mapping | BaseTool) or not isinstance(tools, Sequence):
            raise ConfigError(f"tools is a {type(tools).__name__}: give a list of tools")
        specs = tuple(_spec(tool, index) for index, tool in enumerate(tools))
        choice = _choice(tool_choice, required=tool_required) if specs else "auto"
        return cls(specs, choice, parallel_tool_calls)


def _spec(tool: Any, index: int) -> dict[str, Any]:
    if isinstance(tool, BaseTool):
        return tool.metadata.to_openai_tool(skip_length_check=True)
    if isinstance(tool, Mapping):
        return dict(tool)
    raise ConfigError(
        f"tools[{index}] is a {type(tool).__name__}: give LlamaIndex's tools, such as "
        "FunctionTool.from_defaults(...) returns"
    )


def _choice(given: str | Mapping[str, Any] | None, *, required: bool) -> Any:
    if given is None:
        return "required" if required else "auto"
    if given == "any":
        return "required"
    if isinstance(given, str) and given not in WORDS:
        return {"type": "function", "function": {"name": given}}
    return given


def selections(response: ChatResponse) -> list[ToolSelection]:
    """Return the tools that a response calls; raises ConfigError where a call is cut off."""
    called = _called(response.message)
    is_whole = all(isinstance(arguments, Mapping) for _, _, arguments in called)
    is_cut = not (called or response.message.content) or not is_whole
    if is_cut and isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length":
        raise ConfigError("max_tokens ended the call of a tool: give a higher max_tokens")
    return [
        ToolSelection(tool_id=call_id, tool_name=name, tool_kwargs=_kwargs(arguments))
        for call_id, name, arguments in called
    ]


def _called(message: ChatMessage) -> list[tuple[str, str, Any]]:
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [(one.tool_call_id or "", one.tool_name, one.tool_kwargs) for one in blocks]
    plain: list[dict[str, Any]] = message.additional_kwargs.get(TOOL_CALLS) or []
    functions = [(call.get("id") or "", call["function"]) for call in plain]
    return [(name, one["name"], one.get("arguments") or {}) for name, one in functions]


def _kwargs(arguments: Mapping[str, Any] | str) -> Any:
    try:
        return parse_partial_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return {}
