"""Which source document a LangChain Document was cut from, and where it stood in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cacheblend_rag import Chunk, ConfigError, read_boundary
from cacheblend_rag import Document as EngineDocument
from langchain_core.documents import Document

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


def checked_documents(documents: Iterable[Document]) -> list[Document]:
    """Return the documents as a list; raises ConfigError, naming the field, for anything else."""
    if isinstance(documents, str | Document) or not isinstance(documents, Iterable):
        raise ConfigError(f"documents is a {type(documents).__name__}: give a list of Documents")
    found = list(documents)
    for index, document in enumerate(found):
        if not isinstance(document, Document):
            raise ConfigError(
                f"documents[{index}] is a {type(document).__name__}: give LangChain's Documents, "
                "such as Document(page_content=...)"
            )
    return found


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
        source = document_id(document, key)
        if source is None:
            found.append(Chunk(document.page_content))
        else:
            groups.setdefault(source, []).append(document)
    for source, parts in groups.items():
        ordered = _in_order(parts)
        texts = tuple(d.page_content for d in ordered)
        boundaries = tuple(read_boundary(d.metadata) for d in ordered)
        found.append(EngineDocument(source, texts, collection=collection, boundaries=boundaries))
    return found


def _in_order(parts: Sequence[Document]) -> list[Document]:
    """Order chunks by page and ``start_index`` where every one has a place of its own.

    Otherwise the order given stands: text splitters keep it, and a source loaded in several parts
    (rows, sections) counts ``start_index`` anew in each.
    """
    placed = {place: part for part in parts if (place := _place(part)) is not None}
    return [placed[place] for place in sorted(placed)] if len(placed) == len(parts) else list(parts)


def _place(part: Document) -> tuple[int, int] | None:
    page, start = part.metadata.get("page", 0), part.metadata.get("start_index", -1)
    if not isinstance(page, int) or not isinstance(start, int) or start < 0:
        return None
    return page, start
