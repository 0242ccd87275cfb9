"""What a prompt template says before its first variable: the lead-in of all passages."""

from __future__ import annotations

from typing import Any

from cacheblend_rag import BlendPrompt, ChunkRegistry
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from langchain_cacheblend.messages import plain_text, to_engine_messages

MARK = "\ue000"


def prompt_instruction(prompt: BasePromptTemplate[Any], tokenizer: Any) -> str:
    """Return the text that every prompt of this template begins with, as the model reads it.

    That is the rendered prompt up to its first variable, chat template included. Where the passages
    are not the first variable (a history stands before them, say), it ends there.
    """
    values: dict[str, Any] = dict.fromkeys(prompt.input_variables, MARK)
    for name in _message_variables(prompt):
        values[name] = [HumanMessage(MARK)]
    messages = prompt.format_prompt(**values).to_messages()
    return render(messages, tokenizer).partition(MARK)[0]


def render(messages: list[BaseMessage], tokenizer: Any) -> str:
    """Return messages as one text, by the tokenizer's chat template where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return plain_text(messages)
    return BlendPrompt.from_messages(to_engine_messages(messages), ChunkRegistry(), tokenizer).text


def _message_variables(prompt: BasePromptTemplate[Any]) -> list[str]:
    """Return the variables that take messages, not text."""
    if not isinstance(prompt, ChatPromptTemplate):
        return []
    return [m.variable_name for m in prompt.messages if isinstance(m, MessagesPlaceholder)]
