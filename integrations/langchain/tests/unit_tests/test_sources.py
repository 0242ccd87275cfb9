"""Which chunks belong to one document, and in which order."""

from __future__ import annotations

from cacheblend_rag import Chunk
from cacheblend_rag import Document as EngineDocument
from langchain_core.documents import Document

from langchain_cacheblend.sources import document_id, to_engine_documents, to_hints


def chunk(text: str, **metadata: object) -> Document:
    return Document(page_content=text, metadata=metadata)


def test_the_source_is_read_from_what_loaders_leave() -> None:
    assert document_id(chunk("x", source="a.txt", page=3)) == "a.txt"
    assert document_id(chunk("x", source="a.txt", doc_id="7")) == "7"
    assert document_id(chunk("x", id=12)) == "12"
    assert document_id(chunk("x", title="t")) is None
    assert document_id(chunk("x", source="")) is None


def test_chunks_of_one_source_make_one_document() -> None:
    documents = [
        chunk("b1", source="b"),
        chunk("a1", source="a"),
        chunk("alone"),
        chunk("a2", source="a"),
    ]
    assert to_engine_documents(documents) == [
        Chunk("alone"),
        EngineDocument("b", ("b1",)),
        EngineDocument("a", ("a1", "a2")),
    ]


def test_start_index_orders_chunks_within_pages() -> None:
    documents = [
        chunk("p1b", source="a", page=1, start_index=90),
        chunk("p0b", source="a", page=0, start_index=80),
        chunk("p1a", source="a", page=1, start_index=0),
        chunk("p0a", source="a", page=0, start_index=0),
    ]
    assert to_engine_documents(documents) == [EngineDocument("a", ("p0a", "p0b", "p1a", "p1b"))]


def test_the_order_given_stands_where_start_index_counts_anew() -> None:
    rows = [chunk(f"row {i}", source="a.csv", start_index=0) for i in range(3)]
    assert to_engine_documents(rows) == [EngineDocument("a.csv", ("row 0", "row 1", "row 2"))]
    lost = [chunk("x", source="a", start_index=5), chunk("y", source="a", start_index=-1)]
    assert to_engine_documents(lost) == [EngineDocument("a", ("x", "y"))]


def test_documents_without_text_are_left_out() -> None:
    documents = [chunk("", source="a"), chunk(" \n", source="a"), chunk("text", source="a")]
    assert to_engine_documents(documents) == [EngineDocument("a", ("text",))]
    assert to_hints(documents) == [Chunk("text", "a")]


def test_a_boundary_stands_in_the_metadata_of_its_chunk() -> None:
    parts = [("b", "all", 9), ("a", ["hr", "staff"], 0), ("c", "all", 18)]
    documents = [
        chunk(text, source="d", start_index=start, cacheblend_boundary=told)
        for text, told, start in parts
    ]
    (found,) = to_engine_documents([*documents, chunk("", source="d")])
    assert isinstance(found, EngineDocument)
    assert found.chunks == ("a", "b", "c")
    assert found.boundaries == ('["hr", "staff"]', "all", "all")
    assert [tuple(one.context) for one in found.to_chunks()] == [(), (), ("b", "\n\n")]
