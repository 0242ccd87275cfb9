"""LangChain's Documents when they are indexed and when they are retrieved, and hints at them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from cacheblend_rag import CheckedOptions, Chunk, PassageOrder, PrecomputeReport, read_boundary
from cacheblend_rag import Document as EngineDocument
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from pydantic import Field, InstanceOf

from langchain_cacheblend.options import EngineOptions

logger = logging.getLogger(__name__)
DOCUMENT_KEYS = ("document_id", "doc_id", "source", "id")
_scope: ContextVar[list[Chunk] | None] = ContextVar("cacheblend_hints", default=None)


def document_id(document: Document) -> str | None:
    """Return the id of the source document, or None for a text that stands alone.

    It is in the metadata: the first of DOCUMENT_KEYS that is there.
    """
    for name in DOCUMENT_KEYS:
        value = document.metadata.get(name)
        if value is not None and value != "":
            return str(value)
    return None


class _Given(CheckedOptions):
    documents: list[InstanceOf[Document]] = Field(default_factory=list)
    ids: list[str] = Field(default_factory=list)


def checked_documents(documents: Iterable[Document]) -> list[Document]:
    """Return the documents as a list; raises ConfigError, naming the field, for anything else."""
    return _Given(documents=cast("list[Document]", documents)).documents


def to_hints(documents: Iterable[Document]) -> list[Chunk]:
    """Return what a prompt over these documents is expected to hold, to be passed as ``hints``."""
    return [
        Chunk(document.page_content, document_id(document))
        for document in documents
        if document.page_content.strip()
    ]


def to_engine_documents(
    documents: Iterable[Document], collection: str = ""
) -> list[EngineDocument | Chunk]:
    """Group Documents by source: Documents of chunks in order, and Chunks that have no source.

    Documents without text are left out. Where ``metadata["cacheblend_boundary"]`` (who may read a
    chunk) changes, what precedes a chunk ends.
    """
    found: list[EngineDocument | Chunk] = []
    groups: dict[str, list[Document]] = {}
    for document in documents:
        if not document.page_content.strip():
            continue
        if (source := document_id(document)) is None:
            found.append(Chunk(document.page_content))
        else:
            groups.setdefault(source, []).append(document)
    for source, parts in groups.items():
        texts = tuple(part.page_content for part in parts)
        boundaries = tuple(read_boundary(part.metadata) for part in parts)
        found.append(EngineDocument(source, texts, collection=collection, boundaries=boundaries))
    return found


class CacheBlendTransformer(EngineOptions, BaseDocumentTransformer):
    """Computes and stores the KV of split Documents, and returns them unchanged.

    .. code-block:: python

        chunks = splitter.split_documents(documents)
        CacheBlendTransformer(engine=llm.engine).transform_documents(chunks)
        store.add_documents(chunks)

    Chunks of one source document are computed after the chunks before them, as far back as
    ``metadata["cacheblend_boundary"]`` (who may read a chunk) is the same. So give all of them in
    one call, in order; they replace the document's earlier chunks in the collection. The source is
    the first of the metadata ``document_id``, ``doc_id``, ``source`` and ``id``; chunks without one
    stand alone.
    """

    collection: str = ""
    """Several indexes over the same documents, split in other ways, each need one of their own."""
    register_only: bool = False
    """Whether nothing is computed, only made known: for a corpus too large to precompute, whose
    chunks an LLM with ``fill_on_miss=True`` computes once they are missed."""
    show_progress: bool = False
    """Whether a bar is shown."""

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Store what is new of these documents' KV and return the documents as they are."""
        given = checked_documents(documents)
        self.precompute(given)
        return given

    def precompute(self, documents: Iterable[Document]) -> PrecomputeReport:
        """As transform_documents, but return how many chunks were computed, skipped or refused."""
        checked = checked_documents(documents)
        given = to_engine_documents(checked, self.collection)
        report = self.engine.precompute(
            given, progress=self.show_progress, register_only=self.register_only
        )
        for reason, count in report.refused.items():
            logger.warning("%d chunks were not precomputed: %s", count, reason)
        return report

    def evict(self, document_ids: str | Iterable[str]) -> int:
        """Forget the collection's part of source documents and drop its KV.

        Args:
            document_ids: one or several.

        Returns:
            How many chunks were dropped.

        Raises:
            ConfigError: for an id that is no text.
        """
        given = _Given(ids=[document_ids] if isinstance(document_ids, str) else [*document_ids])
        return sum(self.engine.evict_document(name, self.collection) for name in given.ids)


class CacheBlendCompressor(EngineOptions, BaseDocumentCompressor):
    """Puts retrieved Documents in order, starts loading their KV and hints at them.

    Nothing is dropped and no text is changed. Put it last, behind rerankers and filters.
    """

    order: PassageOrder = PassageOrder.SCORE
    """``score`` keeps the order given. ``document`` brings chunks of one document together, in its
    own order, the best document first. ``reverse`` puts the best last, next to the question."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the documents in order; their KV is on its way to the fastest tier."""
        documents = checked_documents(documents)
        self.engine.prefetch([chunk for d in documents if (chunk := self._known(d))])
        publish(to_hints(documents))
        return self.order.arrange(
            documents,
            document_of=document_id,
            positions_of=lambda found: [self._place(document) for document in found],
        )

    def _place(self, document: Document) -> int:
        """Return the chunk's number in its document; unknown chunks come last."""
        chunk = self._known(document)
        if chunk is None:
            return sys.maxsize
        return self.engine.registry.document(chunk.document_id or "", chunk.collection).index(chunk)

    def _known(self, document: Document) -> Chunk | None:
        """Return the registered chunk with this text, of the document's own source if there."""
        variants = self.engine.registry.variants(document.page_content)
        source = document_id(document)
        own = [chunk for chunk in variants if chunk.document_id == source]
        return next(reversed(own or variants), None)


@contextmanager
def retrieval_hints() -> Iterator[None]:
    """Let ChatCacheBlend see what CacheBlendCompressor returned within this block.

    Chains run their steps in contexts of their own, so hints need a scope around the whole call::

        with retrieval_hints():
            chain.invoke({"input": question})

    Each task and thread sees its own scope, so requests that run side by side never mix. Without a
    scope passages are still found in the prompt; hints only choose between equal texts of several
    documents, and name passages that were altered on their way.
    """
    token = _scope.set([])
    try:
        yield
    finally:
        _scope.reset(token)


def publish(hints: Iterable[Chunk]) -> None:
    """Add hints to the scope around this call, if there is one."""
    scope = _scope.get()
    if scope is not None:
        scope += hints


def current_hints() -> Sequence[Chunk]:
    """Return the hints of the scope around this call."""
    return tuple(_scope.get() or ())
