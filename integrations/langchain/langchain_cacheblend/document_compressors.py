"""CacheBlendCompressor: the last step of retrieval, which makes ready what the prompt will hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cacheblend_rag import Chunk, PassageOrder
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document

from langchain_cacheblend.hints import publish
from langchain_cacheblend.options import EngineOptions
from langchain_cacheblend.sources import checked_documents, document_id, to_hints


class CacheBlendCompressor(EngineOptions, BaseDocumentCompressor):
    """Puts retrieved Documents in order, starts loading their KV and hints at them.

    Nothing is dropped and no text is changed. Put it last, behind rerankers and filters.
    """

    order: PassageOrder = PassageOrder.SCORE
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
        return self.order.arrange(
            documents,
            document_of=lambda document: document_id(document, self.document_key),
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
        source = document_id(document, self.document_key)
        own = [chunk for chunk in variants if chunk.document_id == source]
        return next(reversed(own or variants), None)
