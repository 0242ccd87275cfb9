"""Drops the KV of a conversation."""

from __future__ import annotations

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.prefill.conversation_kv import ConversationKV


def forget_conversation(engine: Engine, conversation: ConversationKV) -> int:
    """Drop the KV of all turns of a conversation; returns how many pieces were stored.

    Args:
        engine: with the store in which it is kept.
        conversation: may go on afterwards; nothing of its earlier turns is reused then.

    Raises:
        StoreError: when the store is read-only.
        ConfigError: when the engine is closed.
    """
    engine._lifetime.check()
    return engine._evict_turns(conversation.forget())
