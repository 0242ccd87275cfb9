"""CacheBlendCompressor: the last step of retrieval, which makes ready what the prompt will hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cacheblend_rag import Chunk
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document

from langchain_cacheblend.hints import publish
from langchain_cacheblend.options import EngineOptions
from langchain_cacheblend.sources import checked_documents, document_id, to_hints

Order = Literal["score", "document", "reverse"]


class CacheBlendCompressor(EngineOptions, BaseDocumentCompressor):
    """Puts retrieved Documents in order, starts loading their KV and hints at them.

    Nothing is dropped and no text is changed. Put it last, behind rerankers and filters.
    """

    order: Order = "score"
    """``score`` keeps the order given. ``document`` brings chunks of one document together, in its
    own order, the best document first. ``reverse`` puts the best last, next to the question."""
    document_key: str | None = None
    """As in CacheBlendTransformer."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the documents in order; their KV is on its way to the fastest tier."""
        documents = checked_documents(documents)
        self.engine.prefetch([chunk for d in documents if (chunk := self._known(d))])
        publish(to_hints(documents, self.document_key))
        return self._in_order(documents)

    def _in_order(self, documents: Sequence[Document]) -> list[Document]:
        if self.order == "score":
            return list(documents)
        if self.order == "reverse":
            return list(reversed(documents))
        groups: dict[str | int, list[Document]] = {}
        for index, document in enumerate(documents):
            source = document_id(document, self.document_key)
            groups.setdefault(index if source is None else source, []).append(document)
        return [d for group in groups.values() for d in sorted(group, key=self._place)]

    def _place(self, document: Document) -> int:
        """Return how many pieces precede the chunk in its document; unknown ones come last."""
        chunk = self._known(document)
        return len(chunk.context) if chunk else 1 << 62

    def _known(self, document: Document) -> Chunk | None:
        """Return the registered chunk with this text, of the document's own source if there."""
        variants = self.engine.registry.variants(document.page_content)
        source = document_id(document, self.document_key)
        own = [chunk for chunk in variants if chunk.document_id == source]
        return next(iter(own or variants), None)
