"""A session's messages are kept, and the KV of its turns is reused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cacheblend_rag import ConfigError, ConversationKV
from langchain_core.messages import HumanMessage

from langchain_cacheblend import ChatCacheBlend
from tests.models import random_engine

QUESTIONS = [
    f"Where does the {word} path lead from the harbour, and who visits the {word} garden?"
    for word in ("quiet", "old", "small", "large")
]


@pytest.fixture
def llm() -> Iterator[ChatCacheBlend]:
    engine = random_engine()
    yield ChatCacheBlend(engine=engine, max_tokens=16)
    engine.close()


def reused(report: Any) -> int:
    return sum(chunk["tokens"] for chunk in report["chunks"] if chunk["hit"])


def test_a_call_may_name_its_conversation(llm: ChatCacheBlend) -> None:
    kv = ConversationKV()
    bound = llm.bind(conversation=kv)
    first = bound.invoke(QUESTIONS[0])
    second = bound.invoke([HumanMessage(QUESTIONS[0]), first, HumanMessage(QUESTIONS[1])])
    assert reused(second.response_metadata["cacheblend"]) >= 16
    with pytest.raises(ConfigError, match="conversation is a str"):
        llm.invoke(QUESTIONS[0], conversation="mine")


def test_its_secret_is_traced_by_no_one(llm: ChatCacheBlend) -> None:
    kv = ConversationKV()
    params = llm._get_invocation_params(conversation=kv)
    assert "conversation" not in params
    assert kv.conversation_id not in llm._get_llm_string(conversation=kv)
