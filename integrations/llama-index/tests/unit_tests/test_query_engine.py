from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import (
    Document,
    PromptTemplate,
    Settings,
)
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import ResponseMode

from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    cacheblend_query_engine,
    collect_reports,
)

SPLITTER = [SentenceSplitter(chunk_size=40, chunk_overlap=0)]


@pytest.fixture
def llm(random_llm: CacheBlendLLM) -> CacheBlendLLM:
    return random_llm


def documents() -> list[Document]:
    return [
        Document(
            text=" ".join(f"{word} number {n} is heavy." for n in range(9)),
            id_=word,
            metadata={"file": f"{word}.txt"},
        )
        for word in ("Stone", "Brick")
    ]


def all_hit(query_engine: Any) -> bool:
    with collect_reports() as reports:
        query_engine.query("What is heavy?")
    return bool(reports[0]["chunks"]) and all(chunk["hit"] for chunk in reports[0]["chunks"])


def test_the_llm_of_settings_is_used(llm: CacheBlendLLM) -> None:
    Settings.llm = llm
    assert all_hit(cacheblend_query_engine(documents(), show_progress=False))


@pytest.mark.parametrize(
    ("given", "instruction"),
    [
        ({}, "Context information is below.\n---------------------\n"),
        (
            {"response_mode": ResponseMode.TREE_SUMMARIZE},
            "Context information from multiple sources is below.\n---------------------\n",
        ),
        ({"text_qa_template": PromptTemplate("Read {context_str}: {query_str}")}, "Read "),
    ],
)
def test_the_instruction_is_the_head_of_the_template(
    given: dict[str, Any], instruction: str, llm: CacheBlendLLM
) -> None:
    query_engine = cacheblend_query_engine(documents(), llm, show_progress=False, **given)
    assert llm.instruction == instruction
    assert all_hit(query_engine)


def test_a_missing_embedding_model_is_missed_before_anything_is_loaded(
    llm: CacheBlendLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_embed_model", None)
    monkeypatch.delenv("IS_TESTING", raising=False)
    with pytest.raises((ImportError, ValueError), match=r"(?i)openai"):
        cacheblend_query_engine(documents(), llm)
    assert not llm.is_open


def test_two_indexes_over_the_same_documents_keep_their_chunks(llm: CacheBlendLLM) -> None:
    fine = [SentenceSplitter(chunk_size=20, chunk_overlap=0)]
    first, second, again = (
        cacheblend_query_engine(documents(), llm, transformations=steps, show_progress=False)
        for steps in (SPLITTER, fine, SPLITTER)
    )
    assert all_hit(first)
    assert all_hit(second)
    chunks = llm.open().registry.document("Stone")
    assert len({chunk.collection for chunk in chunks}) == 2  # the third is the first one's
    again.retriever._index.delete_ref_doc("Stone")
    assert len({chunk.collection for chunk in llm.open().registry.document("Stone")}) == 1
    assert all_hit(second)
