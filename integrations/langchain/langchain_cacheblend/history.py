"""CacheBlendChatMessageHistory: a session's messages, and which KV of its turns is stored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from cacheblend_rag import ConfigError, ConversationKV, forget_conversation, write_private
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict

from langchain_cacheblend.options import EngineOptions

_current: ContextVar[ConversationKV | None] = ContextVar("cacheblend_conversation", default=None)


class CacheBlendChatMessageHistory(BaseChatMessageHistory):
    """The messages of one session; ChatCacheBlend reuses the KV of its earlier turns.

    .. code-block:: python

        history = CacheBlendChatMessageHistory(llm, "session.json")
        with history.reused():
            answer = (prompt | llm).invoke({"history": history.messages, "input": question})
        history.add_messages([HumanMessage(question), answer])

    Sessions never share KV.

    Attributes:
        kv: which KV of the session's turns is stored.
    """

    def __init__(
        self,
        llm: EngineOptions,
        path: str | os.PathLike[str] | None = None,
        *,
        most_messages: int | None = None,
    ) -> None:
        """Begin a session, or resume it.

        Args:
            llm: the chat model, or another component with its engine, which holds the KV.
            path: a file in which messages and the names of KV are saved, for its owner alone. If it
                exists, the session in it is resumed, also on another replica with the same store.
            most_messages: the oldest messages beyond so many are dropped; None keeps all.

        Raises:
            ConfigError: when the file cannot be read, or holds no session.
        """
        self._llm, self._most = llm, most_messages
        self._path = None if path is None else Path(path)
        self.kv = ConversationKV()
        self._messages: list[BaseMessage] = []
        if self._path is not None and self._path.exists():
            self._read(self._path)

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override] # may be set there
        """The messages, oldest first."""
        return list(self._messages)

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Let calls of ChatCacheBlend within this block reuse and keep the KV of turns.

        Each task and thread sees its own block, so sessions that run side by side never mix.
        """
        token = _current.set(self.kv)
        try:
            yield
        finally:
            _current.reset(token)

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add messages, and save them if there is a file."""
        kept = [*self._messages, *messages]
        self._messages = kept if self._most is None else kept[max(0, len(kept) - self._most) :]
        self._save()

    def clear(self) -> None:
        """Drop all messages, and evict the KV of their turns."""
        self._messages = []
        forget_conversation(self._llm.engine, self.kv)
        self._save()

    def _read(self, path: Path) -> None:
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            self.kv = ConversationKV.from_plain(plain["kv"])
            self._messages = messages_from_dict(plain["messages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"{path} holds no session: {error!s:.200}") from error

    def _save(self) -> None:
        if self._path is not None:
            plain = {"messages": messages_to_dict(self._messages), "kv": self.kv.to_plain()}
            write_private(self._path, json.dumps(plain))


def current_conversation() -> ConversationKV | None:
    """Return the KV of the session around this call, or None."""
    return _current.get()
