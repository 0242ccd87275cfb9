"""Documents over HTTP: their chunks' KV is stored, listed and evicted by clients in any language.

Errors are OpenAI's error objects: ``{"error": {"message", "type", "param", "code"}}``. The routes
find the engine in the application's state, under STORERS_STATE. Whoever includes them must check
keys before: they read and change all of an engine's documents.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

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
from cacheblend_rag.api.gate import EngineLending, to_its_end
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.vllm.middleware.keys import STORERS_PATH, STORERS_STATE
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.errors import ConfigError, EngineUnavailableError
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.text import chunk as text_chunk
from cacheblend_rag.text.chunk import Chunk

T = TypeVar("T")
NO_ENGINE = "documents need the access middleware and the connector: use cacheblend-rag serve"


def threaded(work: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    """Return a route that does work in a thread, to its end, but never keeps a server from ending.

    FastAPI's own threads would: a server that is told to end waits for them.
    """

    @wraps(work)
    async def route(**given: Any) -> T:
        return await to_its_end(lambda: work(**given))

    return route


async def _sent(request: Request) -> DocumentIn:
    """Parse the body as a document, in a thread, whatever its Content-Type is."""
    try:
        return await asyncio.to_thread(DocumentIn.model_validate_json, await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


async def _reading(request: Request) -> AsyncIterator[Engine]:
    async with lending(request).lent(request) as engine:
        yield engine


async def _changing(document_id: DocumentId, request: Request) -> AsyncIterator[Engine]:
    async with lending(request).lent(request, document_id) as engine:
        yield engine


Reading = Annotated[Engine, Depends(_reading, scope="function")]
"""The engine for a route that reads, until it has returned."""
Changing = Annotated[Engine, Depends(_changing, scope="function")]
"""The engine for a route that changes a document, until it has returned."""
Sent = Annotated[DocumentIn, Depends(_sent)]
Collection = Annotated[
    str | None, Query(description="Only the document of this collection; all by default.")
]
After = Annotated[str, Query(max_length=LONGEST_ID, description="The last id of the page before.")]
ONE = "/documents/{document_id:path}"
ROUTER: dict[str, Any] = {
    "prefix": STORERS_PATH,
    "route_class": OneLineRoute,
    "tags": ["documents"],
    "responses": {"4XX": {"model": Failure}, 503: {"model": Failure}},
}
SENT_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": DocumentIn.model_json_schema()}},
    }
}
store_router, documents_router = APIRouter(**ROUTER), APIRouter(**ROUTER)


@store_router.get("/stats")
@threaded
def get_stats(engine: Reading) -> Stats:
    """Return counts of documents and chunks, and whether the server reuses them."""
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
        tiers={} if (store := getattr(engine, "store", None)) is None else store.stats(),
    )


@store_router.post("/release")
@threaded
def post_release(engine: Reading) -> Released:
    """Free the memory of chunk KV; what is stored elsewhere too is read again when needed."""
    return Released(released_bytes=engine.release())


@documents_router.put(ONE, openapi_extra=SENT_SCHEMA)
@threaded
def put_document(document_id: DocumentId, sent: Sent, engine: Changing) -> StoredDocument:
    """Store a document: the KV of its chunks is computed, and an earlier version replaced.

    The answer comes once all of it is stored. ``failed`` above 0 means that a part of it may be
    stored by another try.
    """
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
        seconds=round(report.seconds, 6),
    )


@documents_router.get(ONE)
@threaded
def get_document(
    document_id: DocumentId, engine: Reading, collection: Collection = None
) -> Document:
    """Return a document's chunks, and which of them are stored."""
    chunks = _known(engine, document_id, collection)
    told = [
        DocumentChunk(text=chunk.text, stored=there, collection=chunk.collection)
        for chunk, there in zip(chunks, _stored(engine, chunks), strict=True)
    ]
    return Document(id=document_id, chunks=told)


@documents_router.delete(ONE)
@threaded
def delete_document(
    document_id: DocumentId, engine: Changing, collection: Collection = None
) -> DeletedDocument:
    """Forget a document, and evict the KV of those chunks that no other document has."""
    _known(engine, document_id, collection)
    evicted = engine.evict_document(document_id, collection)
    return DeletedDocument(
        id=document_id,
        deleted=not evicted.pending,
        evicted=evicted,
        pending=list(evicted.pending),
        message=evicted.waiting,
    )


@documents_router.get("/documents")
@threaded
def get_documents(
    engine: Reading,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
    after: After = "",
    collection: Collection = None,
) -> DocumentList:
    """Return the documents, by their ids, a page at a time."""
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


def lending(request: Request) -> EngineLending:
    """Return the lender of this application's engines; raises EngineUnavailableError."""
    found: EngineLending | None = getattr(request.app.state, STORERS_STATE, None)
    if found is None:
        raise EngineUnavailableError(NO_ENGINE)
    return found


def split(engine: Engine, text: str, chunk_tokens: int) -> list[str]:
    """Cut a text into chunks of at most so many tokens, at paragraphs, lines, sentences, words."""
    plan = AnalysisPlan(chunk_tokens=chunk_tokens, overlap=0)
    cut = cut_document(text, plan, lambda piece: len(engine.tokenize(piece)))
    return list(dict.fromkeys(text[one.start : one.end] for one in cut))


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
