"""LangChain messages as an engine takes them, with passages kept word for word."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from cacheblend_rag import PromptError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

SEPARATOR = "\n\n"
CALL_BLOCKS = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"}
)
THOUGHT_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking"})


def to_engine_messages(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Return role and content of each message; neighbours of one role are joined by a blank line.

    What a tool returned is said by the user: many chat templates print tool messages as JSON, where
    a passage would no longer stand word for word. An AI message that only calls tools is left out.
    Raises PromptError, naming the field, when a message holds anything but text.
    """
    said = [
        {"role": _role(message), "content": text}
        for index, message in enumerate(messages)
        if (text := _text(message, f"messages[{index}]")) or not isinstance(message, AIMessage)
    ]
    return [
        {"role": role, "content": SEPARATOR.join(message["content"] for message in group)}
        for role, group in groupby(said, key=itemgetter("role"))
    ]


def to_chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the OpenAI form, with calls of tools, and results as such.

    For prompts with tools, which the engine renders as the model's template wants them. Neighbours
    of one role without calls are joined by a blank line; an AI message without text or calls is
    left out. Raises PromptError, naming the field, when a message holds anything but text.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        text = _text(message, f"messages[{index}]")
        if isinstance(message, ToolMessage):
            found.append(_result(message, text))
            continue
        said: dict[str, Any] = {"role": _role(message), "content": text}
        if isinstance(message, AIMessage):
            if message.tool_calls:
                said["tool_calls"] = [_call(call) for call in message.tool_calls]
            elif not text:
                continue
        last = found[-1] if found else {}
        if said.keys() == last.keys() and said["role"] == last["role"] and "tool_calls" not in last:
            last["content"] += SEPARATOR + text
        else:
            found.append(said)
    return found


def plain_text(messages: Sequence[BaseMessage]) -> str:
    """Return messages as one text for a model without a chat template: joined by blank lines."""
    return SEPARATOR.join(message["content"] for message in to_engine_messages(messages))


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call["args"], ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"] or "", "type": "function", "function": function}


def _result(message: ToolMessage, text: str) -> dict[str, Any]:
    said = {"role": "tool", "content": text, "tool_call_id": message.tool_call_id}
    return {**said, "name": message.name} if message.name else said


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, SystemMessage):
        return "system"
    return "assistant" if isinstance(message, AIMessage) else "user"


def _text(message: BaseMessage, name: str) -> str:
    if isinstance(message.content, str):
        return message.content
    skipped = CALL_BLOCKS | THOUGHT_BLOCKS if isinstance(message, AIMessage) else frozenset()
    texts = []
    for index, block in enumerate(message.content):
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") not in skipped:
            texts.append(_block_text(block, f"{name}.content[{index}]"))
    return "\n".join(texts)


def _block_text(block: dict[str, object], name: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind != "text" or not isinstance(text, str):
        raise PromptError(f"{name} is a block of type {kind!r}: this model reads text blocks only")
    return text
