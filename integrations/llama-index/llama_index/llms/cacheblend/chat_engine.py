"""cacheblend_chat_engine: a chat engine that reuses retrieved chunks' KV and earlier turns'."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONTEXT_PROMPT_TEMPLATE
from llama_index.core.chat_engine.context import DEFAULT_CONTEXT_TEMPLATE
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.chat_engine.utils import get_prefix_messages_with_context
from llama_index.core.indices.base import BaseIndex
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate

from cacheblend_rag import ConfigError
from llama_index.llms.cacheblend.chat_memory import CacheBlendChatMemory
from llama_index.llms.cacheblend.indexing import Passages, Source
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.prompt_helper import CacheBlendPromptHelper


def cacheblend_chat_engine(
    source: Source,
    llm: CacheBlendLLM | None = None,
    *,
    chat_mode: ChatMode | str = ChatMode.CONTEXT,
    memory: CacheBlendChatMemory | None = None,
    system_prompt: str | None = None,
    **options: Any,
) -> BaseChatEngine:
    """Return a chat engine that reuses the KV of retrieved chunks and of earlier turns.

    LlamaIndex puts what it retrieves into the system message; the turns' KV is reused behind it.

    Args:
        source: documents or an index, as for cacheblend_query_engine.
        llm: answers; by default ``Settings.llm``. With documents, unless it has an instruction or
            was opened before, chunks are precomputed after the beginning of the system message.
        chat_mode: ``context``: each message is what is searched for; ``condense_plus_context``:
            the LLM first makes a question of it that stands alone.
        memory: of the conversation; by default a new one.
        system_prompt: what stands behind the passages in the system message.
        **options: those of cacheblend_query_engine.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind.
    """
    passages = Passages.of(source, llm, options)
    if chat_mode not in MODES:
        raise ConfigError(f"chat_mode={chat_mode!r} must be one of {', '.join(MODES)}")
    engine, template = MODES[ChatMode(chat_mode)]
    head = None
    if not isinstance(passages.source, BaseIndex):
        # The messages that the engine asks with, as far as a template gives them.
        head = ChatPromptTemplate(
            get_prefix_messages_with_context(
                PromptTemplate(template), system_prompt or "", [], [], MessageRole.SYSTEM
            )
        )
    retriever = passages.retriever(head)
    memory = CacheBlendChatMemory.from_defaults(passages.llm) if memory is None else memory
    made: BaseChatEngine = engine.from_defaults(
        retriever=retriever,
        llm=passages.llm.in_conversation(memory.kv),
        memory=memory,
        system_prompt=system_prompt,
        node_postprocessors=passages.postprocessors(),
    )
    return made


class _WholeChunks:
    """Lets a chat engine pack its prompts with whole chunks."""

    _llm: Any

    def _get_response_synthesizer(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._get_response_synthesizer(*args, **kwargs)  # type: ignore[misc] # LlamaIndex's
        made._prompt_helper = CacheBlendPromptHelper.from_llm(self._llm)
        return made


class _ContextChat(_WholeChunks, ContextChatEngine): ...


class _CondenseChat(_WholeChunks, CondensePlusContextChatEngine): ...


MODES: dict[ChatMode, tuple[type[Any], str]] = {
    ChatMode.CONTEXT: (_ContextChat, DEFAULT_CONTEXT_TEMPLATE),
    ChatMode.CONDENSE_PLUS_CONTEXT: (_CondenseChat, DEFAULT_CONTEXT_PROMPT_TEMPLATE),
}
