"""What the documents' routes do with an engine; each function blocks, and runs in a thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus

from cacheblend_rag.api.document_models import (
    CHUNK_TOKENS,
    DeletedDocument,
    Document,
    DocumentChunk,
    DocumentIn,
    DocumentList,
    ListedDocument,
    Released,
    Stats,
    StoredDocument,
)
from cacheblend_rag.api.errors import ApiError
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.text import chunk as text_chunk
from cacheblend_rag.text.chunk import Chunk


def store_document(
    engine: Engine, document_id: str, asked: DocumentIn, started: float
) -> StoredDocument:
    """Store a document; started: when it was asked for, by ``time.perf_counter``."""
    chunks = asked.chunks or split(engine, asked.text or "", asked.chunk_tokens or CHUNK_TOKENS)
    document = text_chunk.Document(
        document_id,
        tuple(chunks),
        asked.separator,
        asked.collection,
        tuple(asked.boundaries or ()),
    )
    report = engine.precompute([document], progress=False)
    refused = Counter[str]()
    for reason, count in report.refused.items():
        refused[str(reason)] += count
    return StoredDocument(
        id=document_id,
        collection=asked.collection,
        chunks=len(chunks),
        computed=report.computed,
        skipped=report.skipped,
        refused=dict(refused),
        failed=sum(report.failed.values()),
        replaced=report.replaced,
        pending=list(report.replaced.pending),
        message=report.replaced.waiting,
        computed_tokens=report.computed_tokens,
        seconds=round(time.perf_counter() - started, 6),
    )


def split(engine: Engine, text: str, chunk_tokens: int) -> list[str]:
    """Cut a text into chunks of at most so many tokens, at paragraphs, lines, sentences, words."""
    cut = cut_document(
        text,
        AnalysisPlan(chunk_tokens, overlap=0),
        lambda piece: len(engine.tokenize(piece)),
        lambda _: 0,
        document_id="",
        collection="",
    )
    return list(dict.fromkeys(one.chunk.text for one in cut.chunks))


def get_document(engine: Engine, document_id: str, collection: str | None) -> Document:
    """Return a document; raises ApiError when there is none."""
    chunks = _known(engine, document_id, collection)
    stored = _stored(engine, chunks)
    return Document(
        id=document_id,
        chunks=[
            DocumentChunk(text=chunk.text, stored=there, collection=chunk.collection)
            for chunk, there in zip(chunks, stored, strict=True)
        ],
    )


def delete_document(engine: Engine, document_id: str, collection: str | None) -> DeletedDocument:
    """Forget a document; raises ApiError when there is none."""
    _known(engine, document_id, collection)
    evicted = engine.evict_document(document_id, collection)
    return DeletedDocument(
        id=document_id,
        deleted=not evicted.pending,
        evicted=evicted,
        pending=list(evicted.pending),
        message=evicted.waiting,
    )


def list_documents(engine: Engine, limit: int, after: str, collection: str | None) -> DocumentList:
    """Return ``limit`` documents at most, those whose ids come behind ``after``."""
    counts = Counter(
        (chunk.document_id, chunk.collection)
        for chunk in engine.registry.chunks()
        if chunk.document_id is not None
        and chunk.document_id > after
        and collection in {None, chunk.collection}
    )
    ids = sorted({document_id for document_id, _ in counts})
    shown = set(ids[:limit])
    return DocumentList(
        data=[
            ListedDocument(id=document_id, collection=of, chunks=counts[document_id, of])
            for document_id, of in sorted(counts)
            if document_id in shown
        ],
        has_more=len(ids) > limit,
    )


def store_stats(engine: Engine) -> Stats:
    """Return the counts of documents and chunks."""
    chunks = engine.registry.chunks()
    refusal = engine.blend_refusal
    return Stats(
        model=engine.model_name,
        documents=len({(one.document_id, one.collection) for one in chunks if one.document_id}),
        chunks=len(chunks),
        stored_chunks=engine.stored_chunks(),
        reuses=refusal is None,
        reason=None if refusal is None else str(refusal),
        read_only=engine.read_only,
    )


def release_memory(engine: Engine) -> Released:
    """Free the memory of chunk KV."""
    return Released(released_bytes=engine.release())


def _known(engine: Engine, document_id: str, collection: str | None) -> tuple[Chunk, ...]:
    engine.registry.refresh()
    chunks = engine.registry.document(document_id, collection)
    if not chunks:
        within = "" if collection is None else f" in collection {collection[:40]!r}"
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"there is no document {document_id[:40]!r}{within}: GET /v1/cacheblend/documents "
            "lists them",
            param="document_id",
            code="document_not_found",
        )
    return chunks


def _stored(engine: Engine, chunks: tuple[Chunk, ...]) -> Sequence[bool | None]:
    """Return for each chunk whether its KV is stored, None where the engine cannot tell."""
    try:
        return engine.stored([engine.key(chunk) for chunk in chunks])
    except ConfigError:
        return [None] * len(chunks)
