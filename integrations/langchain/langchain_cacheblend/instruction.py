"""What a prompt template says before its first variable: the lead-in of all passages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cacheblend_rag import text_before
from langchain_core.messages import HumanMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder

from langchain_cacheblend.messages import plain_text, to_openai_messages

MARK = "\ue000"


@dataclass(frozen=True)
class TemplateInstruction:
    """The instruction that a prompt template holds, made with the model's tokenizer."""

    template: BasePromptTemplate[Any]

    def __call__(self, tokenizer: Any) -> str:
        return prompt_instruction(self.template, tokenizer)

    def __hash__(self) -> int:
        return hash(repr(self.template))


def prompt_instruction(prompt: BasePromptTemplate[Any], tokenizer: Any) -> str:
    """Return the text that every prompt of this template begins with, as the model reads it.

    That is the rendered prompt up to its first variable, chat template included. Where the passages
    are not the first variable (a history stands before them, say), it ends there. A date in the
    chat template is that of a fixed day.
    """
    values: dict[str, Any] = dict.fromkeys(prompt.input_variables, MARK)
    for part in prompt.messages if isinstance(prompt, ChatPromptTemplate) else ():
        if isinstance(part, MessagesPlaceholder):
            values[part.variable_name] = [HumanMessage(MARK)]
    messages = to_openai_messages(prompt.format_prompt(**values).to_messages())
    if not getattr(tokenizer, "chat_template", None):
        return plain_text(messages).partition(MARK)[0]
    return text_before(MARK, messages, tokenizer)
