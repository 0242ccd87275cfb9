"""Which chunks belong to one document; what is refused or left out."""

from __future__ import annotations

import pytest
from cacheblend_rag import Chunk, ConfigError
from cacheblend_rag import Document as EngineDocument
from langchain_core.documents import Document

from langchain_cacheblend import CacheBlendCompressor, CacheBlendTransformer
from langchain_cacheblend.documents import document_id, to_engine_documents, to_hints
from tests.models import toy_engine


def chunk(text: str, **metadata: object) -> Document:
    return Document(page_content=text, metadata=metadata)


def test_the_source_is_read_from_what_loaders_leave() -> None:
    assert document_id(chunk("x", source="a.txt", page=3)) == "a.txt"
    assert document_id(chunk("x", source="a.txt", doc_id="7")) == "7"
    assert document_id(chunk("x", id=12)) == "12"
    assert document_id(chunk("x", title="t", source="")) is None


def test_chunks_with_text_of_one_source_make_one_document_in_the_order_given() -> None:
    documents = [
        chunk("b1", source="b"),
        chunk("a1", source="a", cacheblend_boundary=["hr", "staff"]),
        chunk("alone"),
        chunk(" \n", source="a"),
        chunk("a2", source="a", cacheblend_boundary="all"),
        chunk("a3", source="a", cacheblend_boundary="all"),
    ]
    alone, first, second = to_engine_documents(documents)
    assert (alone, first) == (Chunk("alone"), EngineDocument("b", ("b1",)))
    assert isinstance(second, EngineDocument)
    assert (second.document_id, second.chunks) == ("a", ("a1", "a2", "a3"))
    assert second.boundaries == ('["hr", "staff"]', "all", "all")
    assert [tuple(one.context) for one in second.to_chunks()] == [(), (), ("a2", "\n\n")]
    assert to_hints(documents[2:4]) == [Chunk("alone")]


def test_documents_come_once_from_a_generator_and_without_text_pass_through() -> None:
    documents = [chunk("The river is quiet.", source="a"), chunk("", source="a"), chunk(" \n")]
    transformer = CacheBlendTransformer(engine=toy_engine())
    assert transformer.transform_documents(d for d in documents) == documents
    assert len(transformer.engine.registry) == 1
    with pytest.raises(ConfigError, match="ids must be a valid string"):
        transformer.evict(documents)


def test_wrong_documents_are_named_before_anything_is_loaded() -> None:
    transformer = CacheBlendTransformer(model="no-such-model")
    compressor = CacheBlendCompressor(model="no-such-model")
    for documents, told in (
        ("text", "documents must be a valid list"),
        (Document("text"), "documents must be an instance of Document"),
        (["text"], "documents must be an instance of Document"),
    ):
        for use in (
            transformer.transform_documents,
            lambda d: compressor.compress_documents(d, ""),
        ):
            with pytest.raises(ConfigError, match=told):
                use(documents)
