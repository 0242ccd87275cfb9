"""LangChain's messages in the OpenAI form, with passages kept word for word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag import PromptError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ToolMessage,
    convert_to_openai_messages,
)

SEPARATOR = "\n\n"
NOT_SHOWN = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"}
    | {"reasoning", "thinking", "redacted_thinking"}
)
"""Blocks of an AI message that are no text: calls stand beside it, and reasoning is left out."""
PLAIN = {"role", "content"}


def to_openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the OpenAI form, with calls of tools, and results as such.

    Neighbours of one role without calls are joined by a blank line; an AI message without text or
    calls is left out. Raises PromptError, naming the field, when a message holds anything but text.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        text = _text(message, f"messages[{index}]")
        said: Any = convert_to_openai_messages(message.model_copy(update={"content": text}))
        if not isinstance(message, ToolMessage):
            said.pop("name", None)
        if isinstance(message, AIMessage) and not text and not said.get("tool_calls"):
            continue
        last = found[-1] if found else {}
        if said.keys() == last.keys() == PLAIN and said["role"] == last["role"]:
            last["content"] += SEPARATOR + text
        else:
            found.append(said)
    return found


def plain_text(messages: Sequence[dict[str, Any]]) -> str:
    """Return OpenAI's messages as one text for a model without a chat template."""
    return SEPARATOR.join(message["content"] for message in messages if message["content"])


def _text(message: BaseMessage, name: str) -> str:
    if isinstance(message.content, str):
        return message.content
    skipped = NOT_SHOWN if isinstance(message, AIMessage) else frozenset()
    texts = []
    for index, block in enumerate(message.content):
        if isinstance(block, str):
            texts.append(block)
        elif (kind := block.get("type")) == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind not in skipped:
            raise PromptError(
                f"{name}.content[{index}] is a block of type {kind!r}: this model reads text "
                "blocks only"
            )
    return "\n".join(texts)
