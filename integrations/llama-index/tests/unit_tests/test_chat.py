"""Chat engines: which messages a prompt holds, and what is searched for."""

from __future__ import annotations

from typing import Any

from llama_index.core import Document
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.node_parser import SentenceSplitter
from toy import TOY

from llama_index.llms.cacheblend import (
    CacheBlendChatMemory,
    CacheBlendLLM,
    cacheblend_chat_engine,
    collect_reports,
)


def small_llm(**fields: Any) -> CacheBlendLLM:
    return CacheBlendLLM(model=TOY, blend_config={"min_tokens": 0}, max_tokens=2, **fields)


SPLITTER = SentenceSplitter(chunk_size=40, chunk_overlap=0)


def documents() -> list[Document]:
    return [
        Document(text=" ".join(f"{word} number {n} is heavy." for n in range(9)), id_=word)
        for word in ("Stone", "Brick")
    ]


def test_the_oldest_messages_are_left_out_from_a_users_message_on() -> None:
    llm = small_llm()
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


def test_documents_are_computed_after_the_head_of_the_system_message() -> None:
    for mode, head in (
        ("context", "Use the context information"),
        ("condense_plus_context", "\n "),
    ):
        llm = small_llm(namespace=f"head of {mode}")
        cacheblend_chat_engine(documents(), llm, chat_mode=mode, show_progress=False)
        assert llm.instruction
        assert llm.instruction.removeprefix("<bos>").startswith(head)


def test_a_prompt_too_long_is_cut_between_chunks() -> None:
    llm = small_llm(namespace="whole chunks", context_window=900)
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
