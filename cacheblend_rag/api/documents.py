"""Documents over HTTP: their chunks' KV is stored, listed and evicted by clients in any language.

Errors are OpenAI's error objects: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from cacheblend_rag.api.document_models import (
    CHUNK_TOKENS,
    LONGEST_ID,
    MOST_LISTED,
    SHOWN,
    DeletedDocument,
    Document,
    DocumentChunk,
    DocumentId,
    DocumentIn,
    DocumentList,
    Failure,
    ListedDocument,
    Released,
    Stats,
    StoredDocument,
)
from cacheblend_rag.api.errors import OneLineRoute
from cacheblend_rag.api.gate import EngineOf, EngineWork
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.vllm.middleware.keys import STORERS_PATH
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.text import chunk as text_chunk
from cacheblend_rag.text.chunk import Chunk


async def _of_body(request: Request) -> DocumentIn:
    """Parse the body as a document, in a thread, whatever its Content-Type is."""
    try:
        return await asyncio.to_thread(DocumentIn.model_validate_json, await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


Sent = Annotated[DocumentIn, Depends(_of_body)]
Collection = Annotated[
    str | None, Query(description="Only the document of this collection; all by default.")
]
After = Annotated[str, Query(max_length=LONGEST_ID, description="The last id of the page before.")]


def documents_router(engine_of: EngineOf, *, documents: bool = True) -> APIRouter:
    """Return the routes below ``/v1/cacheblend``, which the access middleware keeps for who stores.

    Args:
        engine_of: see EngineWork.
        documents: whether there are routes for documents, beside those for the store.
    """
    failures: dict[int | str, dict[str, Any]] = {one: {"model": Failure} for one in ("4XX", 503)}
    router = APIRouter(
        prefix=STORERS_PATH, route_class=OneLineRoute, tags=["documents"], responses=failures
    )
    work = EngineWork(engine_of)

    @router.get("/stats")
    async def get_stats(request: Request) -> Stats:
        """Return counts of documents and chunks, and whether the server reuses them."""
        return await work.read(request, store_stats)

    @router.post("/release")
    async def post_release(request: Request) -> Released:
        """Free the memory of chunk KV; what is stored elsewhere too is read again when needed."""
        return await work.read(request, lambda engine: Released(released_bytes=engine.release()))

    if documents:
        _add_documents(router, work)
    return router


def _add_documents(router: APIRouter, work: EngineWork) -> None:
    content = {"application/json": {"schema": DocumentIn.model_json_schema()}}
    body = {"requestBody": {"required": True, "content": content}}

    @router.put("/documents/{document_id:path}", openapi_extra=body)
    async def put_document(document_id: DocumentId, request: Request, sent: Sent) -> StoredDocument:
        """Store a document: the KV of its chunks is computed, and an earlier version replaced.

        The answer comes once all of it is stored. ``failed`` above 0 means that a part of it may be
        stored by another try.
        """
        return await work.change(request, document_id, store_document, document_id, sent)

    @router.get("/documents/{document_id:path}")
    async def get_one(
        document_id: DocumentId, request: Request, collection: Collection = None
    ) -> Document:
        """Return a document's chunks, and which of them are stored."""
        return await work.read(request, get_document, document_id, collection)

    @router.delete("/documents/{document_id:path}")
    async def delete_one(
        document_id: DocumentId, request: Request, collection: Collection = None
    ) -> DeletedDocument:
        """Forget a document, and evict the KV of those chunks that no other document has."""
        return await work.change(request, document_id, delete_document, document_id, collection)

    @router.get("/documents")
    async def get_list(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
        after: After = "",
        collection: Collection = None,
    ) -> DocumentList:
        """Return the documents, by their ids, a page at a time."""
        return await work.read(request, list_documents, limit, after, collection)


def store_document(engine: Engine, document_id: str, sent: DocumentIn) -> StoredDocument:
    """Store a document, and replace an earlier version."""
    begun = time.perf_counter()
    chunks = sent.chunks or split(engine, sent.text or "", sent.chunk_tokens or CHUNK_TOKENS)
    boundaries = tuple(sent.boundaries or ())
    document = text_chunk.Document(
        document_id, tuple(chunks), sent.separator, sent.collection, boundaries
    )
    report = engine.precompute([document], progress=False)
    refused = Counter[str]()
    for reason, count in report.refused.items():
        refused[str(reason)] += count
    return StoredDocument(
        id=document_id,
        collection=sent.collection,
        chunks=len(chunks),
        computed=report.computed,
        skipped=report.skipped,
        refused=dict(refused),
        failed=sum(report.failed.values()),
        replaced=report.replaced,
        pending=list(report.replaced.pending),
        message=report.replaced.waiting,
        computed_tokens=report.computed_tokens,
        seconds=round(time.perf_counter() - begun, 6),
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
    told = [
        DocumentChunk(text=chunk.text, stored=there, collection=chunk.collection)
        for chunk, there in zip(chunks, _stored(engine, chunks), strict=True)
    ]
    return Document(id=document_id, chunks=told)


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
    listed = [
        ListedDocument(id=document_id, collection=of, chunks=counts[document_id, of])
        for document_id, of in sorted(counts)
        if document_id in shown
    ]
    return DocumentList(data=listed, has_more=len(ids) > limit)


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


def _known(engine: Engine, document_id: str, collection: str | None) -> tuple[Chunk, ...]:
    engine.registry.refresh()
    chunks = engine.registry.document(document_id, collection)
    if not chunks:
        within = "" if collection is None else f" in collection {collection[:SHOWN]!r}"
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"there is no document {document_id[:SHOWN]!r}{within}: GET /v1/cacheblend/documents "
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
