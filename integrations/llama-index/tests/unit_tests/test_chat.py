"""A chat engine reuses the KV of its earlier turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.node_parser import SentenceSplitter

from llama_index.llms.cacheblend import (
    CacheBlendChatMemory,
    CacheBlendLLM,
    CacheBlendPrecompute,
    cacheblend_chat_engine,
    collect_reports,
)


@pytest.fixture
def llm(random_model: Path, request: pytest.FixtureRequest) -> CacheBlendLLM:
    """Of a namespace of its own: LLMs with equal settings share an engine while it lives."""
    return CacheBlendLLM(
        model=random_model,
        namespace=request.node.name,
        blend_config={"min_tokens": 0},
        max_tokens=12,
    )


SPLITTER = SentenceSplitter(chunk_size=40, chunk_overlap=0)


def documents() -> list[Document]:
    return [
        Document(text=" ".join(f"{word} number {n} is heavy." for n in range(9)), id_=word)
        for word in ("Stone", "Brick")
    ]


@pytest.fixture
def index(llm: CacheBlendLLM) -> VectorStoreIndex:
    precompute = CacheBlendPrecompute.from_llm(llm, show_progress=False)
    return VectorStoreIndex.from_documents(documents(), transformations=[SPLITTER, precompute])


def test_the_oldest_messages_are_left_out_from_a_users_message_on(llm: CacheBlendLLM) -> None:
    told = [
        ChatMessage(content="word " * 20, role=role)
        for role in (MessageRole.USER, MessageRole.ASSISTANT) * 3
    ]
    most = len(llm.open().tokenize("word " * 20)) + 8
    memory = CacheBlendChatMemory.from_defaults(llm, told, token_limit=3 * most)
    assert memory.get() == told[-2:]
    assert memory.get_all() == told


def test_a_question_that_stands_alone_is_searched_for(acting: Any) -> None:
    llm, script = acting("They are heavy.", "How heavy are bricks?", "Very.")
    chat = cacheblend_chat_engine(
        documents(), llm, chat_mode="condense_plus_context", show_progress=False
    )
    chat.chat("How heavy are stones?")
    assert str(chat.chat("And bricks?")) == "Very."
    assert "Follow Up Input: And bricks?" in str(script.asked[1].prompt)
    contents = [message["content"] for message in script.asked[2].prompt.prompt]
    assert contents[1:] == ["How heavy are stones?", "They are heavy.", "And bricks?"]


def test_documents_are_computed_after_the_head_of_the_system_message(random_model: Path) -> None:
    for mode, head in (
        ("context", "Use the context information"),
        ("condense_plus_context", "\n "),
    ):
        llm = CacheBlendLLM(model=random_model, namespace=f"head of {mode}", max_tokens=1)
        cacheblend_chat_engine(documents(), llm, chat_mode=mode, show_progress=False)
        assert llm.instruction
        assert llm.instruction.removeprefix("<bos>").startswith(head)


def test_a_prompt_too_long_is_cut_between_chunks(random_model: Path) -> None:
    llm = CacheBlendLLM(
        model=random_model,
        namespace="whole chunks",
        blend_config={"min_tokens": 0},
        max_tokens=2,
        context_window=900,
    )
    text = " ".join(f"Stone number {n} is heavy." for n in range(90))
    chat = cacheblend_chat_engine(
        [Document(text=text, id_="Stone")],
        llm,
        transformations=[SPLITTER],
        similarity_top_k=60,
        show_progress=False,
    )
    with collect_reports() as reports:
        chat.chat("Why?")
    assert len(reports) > 1
    assert all(chunk["hit"] for report in reports for chunk in report["chunks"])
