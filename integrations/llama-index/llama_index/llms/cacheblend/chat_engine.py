"""Chat engines that reuse the KV of retrieved chunks and earlier turns, and their memory."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.condense_plus_context import DEFAULT_CONTEXT_PROMPT_TEMPLATE
from llama_index.core.chat_engine.context import DEFAULT_CONTEXT_TEMPLATE
from llama_index.core.chat_engine.types import BaseChatEngine, ChatMode
from llama_index.core.chat_engine.utils import get_prefix_messages_with_context
from llama_index.core.indices.base import BaseIndex
from llama_index.core.memory.types import BaseChatStoreMemory
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate

from cacheblend_rag import ConfigError, ConversationKV, forget_conversation, write_private
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.prompt_helper import CacheBlendPromptHelper
from llama_index.llms.cacheblend.query_engine import Passages, Source

ROLE_TOKENS = 8
"""Upper bound of the tokens that a chat template adds to a message."""


class CacheBlendChatMemory(BaseChatStoreMemory):
    """The messages of one conversation, and which KV of its turns is stored.

    Give it to a chat engine together with ``llm.in_conversation(memory.kv)``, as
    ``cacheblend_chat_engine`` does. Two memories never share KV, even of the same text.
    """

    token_limit: int = Field(
        default=3000, description="Most tokens of the messages that prompts hold.", gt=0
    )
    _kv: ConversationKV = PrivateAttr(default_factory=ConversationKV)
    _llm: CacheBlendLLM | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendChatMemory"

    @classmethod
    def from_defaults(  # type: ignore[override] # ours needs an LLM
        cls,
        llm: CacheBlendLLM,
        chat_history: Sequence[ChatMessage] | None = None,
        *,
        token_limit: int | None = None,
        kv: ConversationKV | None = None,
    ) -> CacheBlendChatMemory:
        """Return the memory of a new conversation.

        Args:
            llm: counts tokens, and its engine holds the KV.
            chat_history: messages that were exchanged before.
            token_limit: most tokens of the messages that prompts hold; the oldest are left out. By
                default half of the model's context window.
            kv: the KV of the conversation; with bounds of its own, for instance.
        """
        limit = llm.metadata.context_window // 2 if token_limit is None else token_limit
        memory = cls(token_limit=limit)
        memory.set(list(chat_history or ()))
        memory._llm, memory._kv = llm, ConversationKV() if kv is None else kv
        return memory

    @classmethod
    def load(cls, path: str | os.PathLike[str], llm: CacheBlendLLM) -> CacheBlendChatMemory:
        """Return the memory of a saved conversation; any replica sharing the KV store may load it.

        Args:
            path: of the file.
            llm: as for from_defaults.

        Raises:
            ConfigError: when it cannot be read, or holds no conversation.
        """
        try:
            plain = json.loads(Path(path).read_text(encoding="utf-8"))
            kv = ConversationKV.from_plain(plain["kv"])
            messages = [ChatMessage.model_validate(one) for one in plain["messages"]]
            return cls.from_defaults(llm, messages, token_limit=plain["token_limit"], kv=kv)
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} holds no conversation: {error!s:.200}") from error

    @property
    def kv(self) -> ConversationKV:
        """Which KV of the conversation's turns is stored."""
        return self._kv

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write messages and the names of their KV to a file that only its owner can read."""
        messages = [message.model_dump(mode="json") for message in self.get_all()]
        plain = {"messages": messages, "token_limit": self.token_limit, "kv": self._kv.to_plain()}
        write_private(path, json.dumps(plain))

    def get(self, input: str | None = None, **kwargs: Any) -> list[ChatMessage]:
        """Return the latest messages within ``token_limit``, from a user's message on."""
        left, kept = self.token_limit, list[ChatMessage]()
        for message in reversed(self.get_all()):
            left -= self._tokens(message.content or "") + ROLE_TOKENS
            if left < 0:
                break
            kept.insert(0, message)
        while kept and kept[0].role is not MessageRole.USER:
            del kept[0]
        return kept

    async def aget(self, input: str | None = None, **kwargs: Any) -> list[ChatMessage]:
        return self.get()

    def reset(self) -> None:
        """Drop all messages, and evict the KV of their turns."""
        super().reset()
        if self._llm is not None:
            forget_conversation(self._llm.open(), self._kv)

    async def areset(self) -> None:
        await asyncio.to_thread(self.reset)

    def _tokens(self, text: str) -> int:
        return len(text if self._llm is None else self._llm.open().tokenize(text))


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
