from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate

from cacheblend_rag import Document, Engine
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPromptHelper

TEMPLATE = PromptTemplate("Notes:\n{context_str}\nAnswer.")
CHAT = ChatPromptTemplate(
    message_templates=[
        ChatMessage(role=MessageRole.SYSTEM, content="Notes:\n{context_str}"),
        ChatMessage(role=MessageRole.USER, content="Answer."),
    ]
)


@pytest.fixture(scope="module")
def passages(demo_engine: Engine) -> Iterator[list[str]]:
    texts = [f"Passage {n} says: " + f"Clara lives in Paris number {n}. " * 12 for n in range(9)]
    texts = [text.strip() for text in texts]
    demo_engine.register([Document("passages", tuple(texts))])
    yield texts
    demo_engine.evict_document("passages")


@pytest.fixture
def helper(llm: CacheBlendLLM) -> CacheBlendPromptHelper:
    llm.context_window = 600
    return CacheBlendPromptHelper.from_llm(llm)


def tokens(llm: CacheBlendLLM, text: str) -> int:
    return len(llm.open().tokenize(text))


@pytest.mark.parametrize("template", [TEMPLATE, CHAT])
def test_packs_hold_whole_passages_and_fit(
    template: PromptTemplate,
    helper: CacheBlendPromptHelper,
    llm: CacheBlendLLM,
    passages: list[str],
) -> None:
    packs = helper.repack(template, [f" {text}\n" for text in passages])
    assert "\n\n".join(packs) == "\n\n".join(passages)
    assert 1 < len(packs) < len(passages)
    for pack in packs:
        prompt = template.format(context_str=pack)
        assert tokens(llm, prompt) + llm.max_tokens <= 600
        assert set(pack.split("\n\n")) <= set(passages)


def test_a_passage_too_long_for_any_prompt_is_split(
    helper: CacheBlendPromptHelper, llm: CacheBlendLLM, passages: list[str]
) -> None:
    long = "A long text. " * 400
    packs = helper.repack(TEMPLATE, [passages[0], long])
    assert packs[0].startswith(passages[0])
    assert all(tokens(llm, pack) <= 600 for pack in packs)
    assert " ".join(packs).count("A long text.") == 400


def test_truncation_ends_with_a_whole_passage(
    helper: CacheBlendPromptHelper, llm: CacheBlendLLM, passages: list[str]
) -> None:
    (kept,) = helper.truncate(TEMPLATE, ["\n".join(passages)])
    assert tokens(llm, kept) <= 600
    assert kept == "\n".join(passages[: kept.count("\n") + 1])
    assert 1 < kept.count("\n") + 1 < len(passages)
    (cut,) = helper.truncate(TEMPLATE, ["unknown " * 4000])
    assert 0 < tokens(llm, cut) <= 600
