"""The text that prompts hold before their first chunk, read off a question template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from cacheblend_rag import PromptError, text_before
from llama_index.llms.cacheblend.messages import plain_messages

CONTEXT_VARIABLES = ("context_str", "context_msg")
PLACE = "\ue000"


def text_before_context(
    template: BasePromptTemplate | None,
    *,
    tokenizer: Any,
    is_chat_model: bool | None,
    system_prompt: str | None,
) -> str:
    """Return what a prompt made of ``template`` says before its context.

    template: None for LlamaIndex's own question template. is_chat_model: None asks the tokenizer.
    """
    renders = bool(getattr(tokenizer, "chat_template", None))
    chat = renders if is_chat_model is None else is_chat_model
    selected = template or DEFAULT_TEXT_QA_PROMPT_SEL
    if isinstance(selected, SelectorPromptTemplate):
        asked: Any = SimpleNamespace(metadata=LLMMetadata(is_chat_model=chat))
        selected = selected.select(llm=asked)
    values = dict.fromkeys(selected.template_vars, "") | dict.fromkeys(CONTEXT_VARIABLES, PLACE)
    if not chat:
        text = f"{system_prompt}\n\n" if system_prompt else ""
        head, found, _ = (text + selected.format(llm=None, **values)).partition(PLACE)
        return head if found else ""
    messages = selected.format_messages(llm=None, **values)
    if system_prompt:
        messages = [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt), *messages]
    try:
        return text_before(PLACE, plain_messages(messages), tokenizer) if renders else ""
    except PromptError:  # of the template, which will refuse the prompt too
        return ""
