"""Chat messages in the OpenAI form: a role, one text, and calls of tools or whose result it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cacheblend_rag import PromptError, ToolCall

ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
}
NOT_SHOWN = (ToolCallBlock, ThinkingBlock, CachePoint)
"""Content blocks that are left out of a message's text, as chat templates leave out reasoning."""
TOOL_CALLS = "tool_calls"
TOOL_CALL_ID = "tool_call_id"


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the OpenAI form; raises PromptError when one holds an image or the like.

    Calls of tools are read from the blocks or, for other LLMs' messages, from additional_kwargs.
    """
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: ChatMessage, index: int) -> dict[str, Any]:
    for block in message.blocks:
        if not isinstance(block, (TextBlock, *NOT_SHOWN)):
            raise PromptError(
                f"messages[{index}] holds a block of type {block.block_type!r}: only text is served"
            )
    role = ROLES.get(message.role, message.role.value)
    plain: dict[str, Any] = {"role": role, "content": message.content or ""}
    if role == "assistant" and (calls := _calls(message)):
        plain[TOOL_CALLS] = calls
    if role == "tool" and (call_id := message.additional_kwargs.get(TOOL_CALL_ID)):
        plain[TOOL_CALL_ID] = call_id
    return plain


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    told = [
        ToolCall(one.tool_call_id or "", one.tool_name, _text(one.tool_kwargs)).to_openai()
        for one in message.blocks
        if isinstance(one, ToolCallBlock)
    ]
    given = message.additional_kwargs.get(TOOL_CALLS) or ()
    return told or [one if isinstance(one, dict) else one.model_dump() for one in given]


def _text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
