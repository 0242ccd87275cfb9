"""Chat messages as an engine takes them: a role and one text."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from cacheblend_rag import PromptError

ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
}


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Return messages as role and content; raises PromptError when one holds more than text."""
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: ChatMessage, index: int) -> dict[str, str]:
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise PromptError(
                f"messages[{index}] holds a block of type {block.block_type!r}: only text is served"
            )
    role = ROLES.get(message.role, message.role.value)
    return {"role": role, "content": message.content or ""}
