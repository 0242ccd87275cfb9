from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import ChatPromptTemplate

from cacheblend_rag import Document, Engine
from cacheblend_rag.errors import ConfigError
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


def test_it_knows_the_models_window_and_output(llm: CacheBlendLLM) -> None:
    helper = CacheBlendPromptHelper.from_llm(llm)
    assert helper.context_window == 4096
    assert helper.num_output == 6


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


def test_a_pack_that_no_longer_fits_is_cut_between_passages(
    helper: CacheBlendPromptHelper, passages: list[str]
) -> None:
    (pack,) = helper.repack(TEMPLATE, passages[:2], padding=0)
    longer = PromptTemplate("word " * 175 + "{context_str}")
    assert helper.repack(longer, [pack], padding=0) == passages[:2]


def test_a_passage_too_long_for_any_prompt_is_split(
    helper: CacheBlendPromptHelper, llm: CacheBlendLLM, passages: list[str]
) -> None:
    long = "A long text. " * 400
    packs = helper.repack(TEMPLATE, [passages[0], long])
    assert packs[0].startswith(passages[0])
    assert all(tokens(llm, pack) <= 600 for pack in packs)
    assert "".join(packs).count("A long text.") >= 400


def test_truncation_ends_with_a_whole_passage(
    helper: CacheBlendPromptHelper, llm: CacheBlendLLM, passages: list[str]
) -> None:
    (kept,) = helper.truncate(TEMPLATE, ["\n".join(passages)])
    assert tokens(llm, kept) <= 600
    assert kept == "\n".join(passages[: kept.count("\n") + 1])
    assert 1 < kept.count("\n") + 1 < len(passages)
    (cut,) = helper.truncate(TEMPLATE, ["unknown " * 4000])
    assert 0 < tokens(llm, cut) <= 600


def test_a_truncated_text_reads_as_text_in_a_template(
    helper: CacheBlendPromptHelper, passages: list[str]
) -> None:
    text = f'{passages[0]}\nIt\'s a "quote" with {{braces}}.'
    assert text in TEMPLATE.format(context_str=helper.truncate(TEMPLATE, [text]))


def test_nothing_is_packed_from_nothing(helper: CacheBlendPromptHelper) -> None:
    assert helper.repack(TEMPLATE, [" ", ""]) == []
    assert helper.truncate(TEMPLATE, []) == []


def test_a_template_that_fills_the_window_is_refused(helper: CacheBlendPromptHelper) -> None:
    with pytest.raises(ValueError, match="available context size"):
        helper.repack(PromptTemplate("word " * 700 + "{context_str}"), ["a text"])


def test_another_llm_is_refused() -> None:
    with pytest.raises(ConfigError, match="llm is a MockLLM: give a CacheBlendLLM"):
        CacheBlendPromptHelper.from_llm(MockLLM())
