"""Documents over HTTP: their chunks' KV is stored, listed and evicted by clients in any language.

Errors are OpenAI's error objects: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from threading import Lock
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import APIRouter, Path, Query, Request

from cacheblend_rag.api.document_models import (
    CHUNK_TOKENS,
    LONGEST_ID,
    MOST_LISTED,
    DeletedDocument,
    Document,
    DocumentChunk,
    DocumentIn,
    DocumentList,
    Failure,
    ListedDocument,
    Released,
    Stats,
    StoredDocument,
    check_id,
    read_document,
)
from cacheblend_rag.api.errors import ApiError, OneLineRoute, busy
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.lifetime import in_thread
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.text import chunk as text_chunk
from cacheblend_rag.text.chunk import Chunk

T = TypeVar("T")
EngineOf = Callable[[Request], Engine]

PREFIX = "/v1/cacheblend"
MOST_BODY_BYTES = 16 << 20
MOST_WAITING = 32
"""Requests that are answered or wait for it; more are refused for now."""
CHANGES, READS = 4, 8
"""Requests that are answered at a time."""

DocumentId = Annotated[
    str, Path(min_length=1, max_length=LONGEST_ID, description="Your own name of the document.")
]
Collection = Annotated[
    str | None, Query(description="Only the document of this collection; all by default.")
]


def documents_router(engine_of: EngineOf) -> APIRouter:
    """Return the routes below ``/v1/cacheblend``.

    Whoever includes them must check keys before: they read and change all of an engine's documents.

    Args:
        engine_of: returns the engine of a request. It is called in a thread, so it may take a
            while, and raises a CacheBlendError when there is none.

    Returns:
        A router to include in a FastAPI application.
    """
    failures: dict[int | str, dict[str, Any]] = {
        status: {"model": Failure} for status in ("4XX", 503)
    }
    router = APIRouter(
        prefix=PREFIX, route_class=OneLineRoute, tags=["documents"], responses=failures
    )
    work = _Work(engine_of)
    body = {"requestBody": {"required": True, "content": _json_of(DocumentIn)}}

    @router.put("/documents/{document_id:path}", openapi_extra=body)
    async def put_document(document_id: DocumentId, request: Request) -> StoredDocument:
        """Store a document: the KV of its chunks is computed, and an earlier version replaced.

        The answer comes once all of it is stored. ``failed`` above 0 means that a part of it may be
        stored by another try.
        """
        check_id(document_id)
        asked = await asyncio.to_thread(read_document, await _body(request))
        started = time.perf_counter()
        return await work.change(
            request,
            document_id,
            lambda engine: store_document(engine, document_id, asked, started),
        )

    @router.get("/documents/{document_id:path}")
    async def get_one(
        document_id: DocumentId, request: Request, collection: Collection = None
    ) -> Document:
        """Return a document's chunks, and which of them are stored."""
        check_id(document_id)
        return await work.read(
            request, lambda engine: get_document(engine, document_id, collection)
        )

    @router.delete("/documents/{document_id:path}")
    async def delete_one(
        document_id: DocumentId, request: Request, collection: Collection = None
    ) -> DeletedDocument:
        """Forget a document, and evict the KV of those chunks that no other document has."""
        check_id(document_id)
        return await work.change(
            request, document_id, lambda engine: delete_document(engine, document_id, collection)
        )

    @router.get("/documents")
    async def get_list(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
        after: Annotated[
            str, Query(max_length=LONGEST_ID, description="The last id of the page before.")
        ] = "",
        collection: Collection = None,
    ) -> DocumentList:
        """Return the documents, by their ids, a page at a time."""
        return await work.read(
            request, lambda engine: list_documents(engine, limit, after, collection)
        )

    @router.get("/stats")
    async def get_stats(request: Request) -> Stats:
        """Return counts of documents and chunks, and whether the server reuses them."""
        return await work.read(request, store_stats)

    @router.post("/release")
    async def post_release(request: Request) -> Released:
        """Free the memory of chunk KV; what is stored elsewhere too is read again when needed."""
        return await work.read(request, release_memory)

    return router


class _Work:
    """Runs an engine's work in threads: reading, and a little storing, at a time.

    The threads are daemons: a server that ends does not wait for a document.
    """

    def __init__(self, engine_of: EngineOf) -> None:
        self._engine_of = engine_of
        self._changing, self._reading = asyncio.Semaphore(CHANGES), asyncio.Semaphore(READS)
        self._turns: WeakValueDictionary[tuple[int, str], Lock] = WeakValueDictionary()
        self._finding_turn = Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def read(self, request: Request, work: Callable[[Engine], T]) -> T:
        """Return the result of work with a request's engine."""
        return await self._run(self._reading, lambda: work(self._engine_of(request)))

    async def change(self, request: Request, name: str, work: Callable[[Engine], T]) -> T:
        """Return the result of work that changes a document; each has one change at a time."""

        def in_turn() -> T:
            engine = self._engine_of(request)
            with self._finding_turn:  # the dictionary's setdefault is not atomic
                turn = self._turns.setdefault((id(engine), name), Lock())
            with turn:
                return work(engine)

        return await self._run(self._changing, in_turn)

    async def _run(self, room: asyncio.Semaphore, work: Callable[[], T]) -> T:
        """Run work in a thread, also to its end if the client has left.

        Raises ApiError when too much is waiting.
        """
        if len(self._tasks) >= MOST_WAITING:
            raise busy(
                f"{MOST_WAITING} requests about documents are being answered: try again later"
            )
        task = asyncio.create_task(_in_turn(room, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


async def _in_turn(room: asyncio.Semaphore, work: Callable[[], T]) -> T:
    async with room:
        return await in_thread(work)


async def _body(request: Request) -> bytes:
    """Read a body that is not too long."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is longer than {MOST_BODY_BYTES >> 20} MiB: send the document in parts, "
                "each with an id of its own",
            )
        parts.append(part)
    return b"".join(parts)


def _json_of(model: type[DocumentIn]) -> dict[str, Any]:
    return {"application/json": {"schema": model.model_json_schema()}}


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
