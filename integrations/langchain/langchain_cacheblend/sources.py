"""Which source document a LangChain Document was cut from, and where it stood in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from cacheblend_rag import CheckedOptions, Chunk, read_boundary
from cacheblend_rag import Document as EngineDocument
from langchain_core.documents import Document
from pydantic import InstanceOf

DOCUMENT_KEYS = ("document_id", "doc_id", "source", "id")


def document_id(document: Document, key: str | None = None) -> str | None:
    """Return the id of the source document, or None for a text that stands alone.

    key: the metadata field that holds it; by default the first of DOCUMENT_KEYS that is there.
    """
    for name in DOCUMENT_KEYS if key is None else (key,):
        value = document.metadata.get(name)
        if value is not None and value != "":
            return str(value)
    return None


class _Given(CheckedOptions):
    documents: list[InstanceOf[Document]]


def checked_documents(documents: Iterable[Document]) -> list[Document]:
    """Return the documents as a list; raises ConfigError, naming the field, for anything else."""
    return _Given(documents=cast("list[Document]", documents)).documents


def to_hints(documents: Iterable[Document], key: str | None = None) -> list[Chunk]:
    """Return what a prompt over these documents is expected to hold, to be passed as ``hints``."""
    return [
        Chunk(document.page_content, document_id(document, key))
        for document in documents
        if document.page_content.strip()
    ]


def to_engine_documents(
    documents: Iterable[Document], key: str | None = None, collection: str = ""
) -> list[EngineDocument | Chunk]:
    """Return source documents with their chunks in order, and chunks that stand alone.

    Documents without text are left out. Where ``metadata["cacheblend_boundary"]`` (who may read a
    chunk) changes, what precedes a chunk ends.
    """
    found: list[EngineDocument | Chunk] = []
    groups: dict[str, list[Document]] = {}
    for document in documents:
        if not document.page_content.strip():
            continue
        if (source := document_id(document, key)) is None:
            found.append(Chunk(document.page_content))
        else:
            groups.setdefault(source, []).append(document)
    for source, parts in groups.items():
        ordered = _in_order(parts)
        texts = tuple(part.page_content for part in ordered)
        boundaries = tuple(read_boundary(part.metadata) for part in ordered)
        found.append(EngineDocument(source, texts, collection=collection, boundaries=boundaries))
    return found


def _in_order(parts: list[Document]) -> list[Document]:
    """Order chunks by page and ``start_index`` where every one has a place of its own.

    Otherwise the order given stands: text splitters keep it, and a source loaded in several parts
    (rows, sections) counts ``start_index`` anew in each.
    """
    placed = {
        (page, start): part
        for part in parts
        if isinstance(page := part.metadata.get("page", 0), int)
        and isinstance(start := part.metadata.get("start_index"), int)
        and start >= 0
    }
    return [placed[place] for place in sorted(placed)] if len(placed) == len(parts) else parts
