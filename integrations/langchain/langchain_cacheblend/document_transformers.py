"""CacheBlendTransformer: computes passages' KV when they are indexed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from cacheblend_rag import CheckedOptions, PrecomputeReport
from langchain_core.documents import BaseDocumentTransformer, Document

from langchain_cacheblend.options import EngineOptions
from langchain_cacheblend.sources import checked_documents, to_engine_documents

logger = logging.getLogger(__name__)


class _Given(CheckedOptions):
    ids: list[str]


class CacheBlendTransformer(EngineOptions, BaseDocumentTransformer):
    """Computes and stores the KV of split Documents, and returns them unchanged.

    .. code-block:: python

        chunks = splitter.split_documents(documents)
        CacheBlendTransformer(engine=llm.engine).transform_documents(chunks)
        store.add_documents(chunks)

    Chunks of one source document are computed after the chunks before them, as far back as
    ``metadata["cacheblend_boundary"]`` (who may read a chunk) is the same. So give all of them in
    one call; they replace the document's earlier chunks in the collection. Chunks without a source
    stand alone.
    """

    document_key: str | None = None
    """The metadata field that names the source document; by default the first of ``document_id``,
    ``doc_id``, ``source`` and ``id`` that is there."""
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
        given = to_engine_documents(checked, self.document_key, self.collection)
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
