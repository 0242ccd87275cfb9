from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    PromptTemplate,
    Settings,
)
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import ResponseMode

from cacheblend_rag.errors import ConfigError
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


def test_an_instruction_of_ones_own_stays(random_model: Path) -> None:
    llm = CacheBlendLLM(model=random_model, instruction="Mine:\n", max_tokens=1)
    cacheblend_query_engine(documents(), llm, show_progress=False)
    assert llm.instruction == "Mine:\n"


def test_another_llm_is_refused() -> None:
    with pytest.raises(ConfigError, match="llm is a MockLLM: give a CacheBlendLLM"):
        cacheblend_query_engine(documents(), MockLLM())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"source": "docs"}, "documents is a str: give a list of documents"),
        ({"source": ["text"]}, "documents[0] is a str: give LlamaIndex's documents"),
        ({"source": Document(text="x")}, "documents is a Document: give a list of documents"),
        ({"order": "best"}, "order='best' must be one of score, document, reverse"),
        ({"response_mode": "compct"}, "response_mode='compct' must be one of refine, compact"),
        ({"similarity_top_k": 0}, "similarity_top_k=0 must be an integer of at least 1"),
        ({"variants": ("bare",)}, "unknown argument 'variants'; known: coll"),
        ({"text_qa_template": "{context_str}"}, "text_qa_template is a str: give a PromptTemplate"),
        ({"text_qa_template": PromptTemplate("{query_str}")}, "must take 'context_str'"),
        ({"transformations": ["x"]}, "transformations[0] is a str: give TransformComponents"),
        ({"transformations": SPLITTER[0]}, "transformations is a SentenceSplitter: give a list of"),
        ({"node_postprocessors": "x"}, "node_postprocessors is a str: give a list of BaseNode"),
        ({"vector_store": "faiss"}, "vector_store is a str: give LlamaIndex's vector store"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_loaded(
    given: dict[str, Any], told: str, random_model: Path
) -> None:
    llm = CacheBlendLLM(model=random_model, namespace="refusing")
    with pytest.raises(ConfigError) as raised:
        cacheblend_query_engine(**{"source": documents(), "llm": llm, **given})
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not llm.is_open


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
