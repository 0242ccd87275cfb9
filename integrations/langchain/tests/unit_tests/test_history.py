"""A session's messages are kept, and the KV of its turns is reused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheblend_rag import ConfigError, ConversationKV, Engine
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from langchain_cacheblend import CacheBlendChatMessageHistory, ChatCacheBlend
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


def told(llm: ChatCacheBlend, history: CacheBlendChatMessageHistory, question: str) -> Any:
    """Ask in a session; returns the report."""
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("past"), ("human", "{input}")])
    with history.reused():
        answer = (prompt | llm).invoke({"past": history.messages, "input": question})
    history.add_messages([HumanMessage(question), answer])
    return answer.response_metadata["cacheblend"]


def reused(report: Any) -> int:
    return sum(chunk["tokens"] for chunk in report["chunks"] if chunk["hit"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kv": 1, "messages": []}'])
def test_a_malformed_file_is_refused(llm: ChatCacheBlend, tmp_path: Path, text: str) -> None:
    path = tmp_path / "session.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no session"):
        CacheBlendChatMessageHistory(llm, path)


def test_clearing_evicts_the_kv(llm: ChatCacheBlend, tmp_path: Path) -> None:
    history = CacheBlendChatMessageHistory(llm, tmp_path / "session.json")
    told(llm, history, QUESTIONS[0])
    engine: Engine = llm.engine
    engine.prefixes.drain()  # type: ignore[attr-defined]
    keys = history.kv.keys()
    assert keys
    assert all(engine.store.contains_many(keys))  # type: ignore[attr-defined]
    history.clear()
    assert history.messages == []
    assert not any(engine.store.contains_many(keys))  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "session.json").read_text())["messages"] == []


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
