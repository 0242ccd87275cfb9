"""Sentences that are retrieved, and shown within the sentences around them, are reused."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import TextNode

from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    cacheblend_query_engine,
    collect_reports,
)
from llama_index.llms.cacheblend.documents import has_window

WINDOW = 2


@pytest.fixture
def llm(random_llm: CacheBlendLLM) -> CacheBlendLLM:
    return random_llm


def documents() -> list[Document]:
    """Paragraphs of three sentences, with metadata that LLMs see."""
    return [
        Document(
            text="\n\n".join(
                " ".join(f"{word} {n} is {kind} heavy." for kind in ("very", "rather", "not"))
                for n in range(4)
            ),
            id_=word,
            metadata={"file": f"{word}.txt"},
        )
        for word in ("Stone", "Brick")
    ]


def asked(llm: CacheBlendLLM, key: str) -> dict[str, Any]:
    parser = SentenceWindowNodeParser.from_defaults(
        sentence_splitter=lambda text: [f"{part}." for part in text.split(".") if part.strip()],
        window_size=WINDOW,
        window_metadata_key=key,
    )
    query_engine = cacheblend_query_engine(
        documents(),
        llm,
        transformations=[parser],
        node_postprocessors=[MetadataReplacementPostProcessor(key)],
        similarity_top_k=2,
        show_progress=False,
    )
    with collect_reports() as reports:
        query_engine.query("What is heavy?")
    (report,) = reports
    return report


@pytest.mark.parametrize("key", ["window", "around"])
def test_every_sentence_of_a_window_is_reused(llm: CacheBlendLLM, key: str) -> None:
    report = asked(llm, key)
    # A window at a document's edge has fewer sentences; no report names a chunk not in the prompt.
    assert len(report["chunks"]) >= 2 * (WINDOW + 1)
    assert all(chunk["hit"] for chunk in report["chunks"])
    assert report["reused_tokens"] > 0


def test_a_window_is_told_by_its_text_whatever_other_metadata_are_hidden() -> None:
    hidden = {"source": "a file about stones", "text": "A stone.", "number": 3}
    node = TextNode(
        text="A stone.",
        metadata={"page": "1", **hidden},
        excluded_llm_metadata_keys=list(hidden),
    )
    assert not has_window(node)
