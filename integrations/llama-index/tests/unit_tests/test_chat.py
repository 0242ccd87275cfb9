"""A chat engine reuses the KV of its earlier turns."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter

from cacheblend_rag.errors import ConfigError
from llama_index.llms.cacheblend import (
    CacheBlendChatMemory,
    CacheBlendLLM,
    CacheBlendPrecompute,
    cacheblend_chat_engine,
    collect_reports,
)

QUESTIONS = [f"How heavy are the {word} stones that stand by the old river?" for word in "abcd"]


@pytest.fixture
def llm(random_model: Path, request: pytest.FixtureRequest) -> CacheBlendLLM:
    """Of a namespace of its own: LLMs with equal settings share an engine while it lives."""
    return CacheBlendLLM(
        model=random_model,
        namespace=request.node.name,
        blend_config={"min_tokens": 0},
        max_tokens=12,
    )


@pytest.fixture
def index(llm: CacheBlendLLM) -> VectorStoreIndex:
    documents = [
        Document(text=" ".join(f"{word} number {n} is heavy." for n in range(9)), id_=word)
        for word in ("Stone", "Brick")
    ]
    precompute = CacheBlendPrecompute.from_llm(llm, show_progress=False)
    splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0)
    return VectorStoreIndex.from_documents(documents, transformations=[splitter, precompute])


def reused_from_turns(chat: Any, question: str, memory: CacheBlendChatMemory) -> int:
    with collect_reports() as reports:
        chat.chat(question)
    (report,) = reports
    # Now the KV of earlier turns is stored: the answer waited for it.
    known = {key.chunk_id for key in memory.kv.keys()}  # noqa: SIM118
    return sum(
        chunk["tokens"] for chunk in report["chunks"] if chunk["hit"] and chunk["chunk_id"] in known
    )


def test_turns_are_reused_behind_what_is_retrieved(
    llm: CacheBlendLLM, index: VectorStoreIndex
) -> None:
    memory = CacheBlendChatMemory.from_defaults(llm)
    chat = cacheblend_chat_engine(index, llm, memory=memory, similarity_top_k=2)
    reused = [reused_from_turns(chat, question, memory) for question in QUESTIONS]
    assert reused[0] == 0
    assert 12 < reused[1] < reused[2] < reused[3]
    assert len(chat.chat_history) == 2 * len(QUESTIONS)


def test_a_memory_is_saved_and_resumed(
    llm: CacheBlendLLM, index: VectorStoreIndex, tmp_path: Path
) -> None:
    memory = CacheBlendChatMemory.from_defaults(llm)
    cacheblend_chat_engine(index, llm, memory=memory).chat(QUESTIONS[0])
    memory.save(tmp_path / "talk.json")
    assert stat.S_IMODE((tmp_path / "talk.json").stat().st_mode) == 0o600
    again = CacheBlendChatMemory.load(tmp_path / "talk.json", llm)
    assert again.get_all() == memory.get_all()
    chat = cacheblend_chat_engine(index, llm, memory=again)
    assert reused_from_turns(chat, QUESTIONS[1], again) > 12
    (tmp_path / "talk.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no conversation"):
        CacheBlendChatMemory.load(tmp_path / "talk.json", llm)


def test_resetting_evicts_the_kv(llm: CacheBlendLLM, index: VectorStoreIndex) -> None:
    memory = CacheBlendChatMemory.from_defaults(llm)
    chat = cacheblend_chat_engine(index, llm, memory=memory)
    chat.chat(QUESTIONS[0])
    engine: Any = llm.open()
    engine.prefixes.drain()
    keys = memory.kv.keys()
    assert keys
    assert all(engine.store.contains_many(keys))
    chat.reset()
    assert memory.get_all() == []
    assert not any(engine.store.contains_many(keys))


def test_the_oldest_messages_are_left_out_from_a_users_message_on(llm: CacheBlendLLM) -> None:
    told = [
        ChatMessage(content="word " * 20, role=role)
        for role in (MessageRole.USER, MessageRole.ASSISTANT) * 3
    ]
    most = len(llm.open().tokenize("word " * 20)) + 8
    memory = CacheBlendChatMemory.from_defaults(llm, told, token_limit=3 * most)
    assert memory.get() == told[-2:]
    assert memory.get_all() == told


def test_another_llm_is_refused(index: VectorStoreIndex) -> None:
    with pytest.raises(ConfigError, match="llm is a MockLLM"):
        cacheblend_chat_engine(index, MockLLM())  # type: ignore[arg-type]
