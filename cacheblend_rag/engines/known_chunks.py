"""Keeps an engine's registry and its stored KV consistent."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import Evicted
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.registry import ChunkRegistry, differ

logger = logging.getLogger(__name__)

Item = Chunk | Document | str
"""Items to precompute or register; a string is a chunk that stands alone."""

EMPTY = Reason(ReasonCode.EMPTY, "empty text")


class KnownChunks:
    """Registered chunks; their KV is dropped once no registered chunk shares it.

    backend: drops KV; may be a weak proxy.
    """

    def __init__(self, registry: ChunkRegistry, lead_in: LeadIn, backend: Backend) -> None:
        self.registry = registry
        self._lead_in, self._backend = lead_in, backend

    def register(self, items: Iterable[Item]) -> None:
        """Register chunks; raises PromptError on empty text."""
        self.registry.add_many([chunk for item in items for chunk in chunks_of(item)])

    def replace(
        self, items: Iterable[Item], refused: Counter[Reason]
    ) -> tuple[list[Chunk], Evicted]:
        """Register items, and drop the KV of chunks that new versions of documents lack.

        Returns the chunks, and for how many KV was dropped; chunks of white space are counted as
        refused.
        """
        given: list[Chunk] = []
        documents: dict[tuple[str, str], bool] = {}
        for item in items:
            for chunk in chunks_of(item):
                if chunk.text.strip():
                    given.append(chunk)
                else:
                    refused[EMPTY] += 1
            if isinstance(item, Document):
                one = item.document_id, item.collection
                documents[one] = bool(item.boundaries) or documents.get(one, False)
        current = set(given)
        stale = [c for one in documents for c in self.registry.document(*one) if c not in current]
        if stale:
            self.registry.discard_many(stale)
        self.registry.add_many(given)
        bounded = [c for c in stale if documents[c.document_id or "", c.collection]]
        replaced = self._forget_priors(bounded) + self._drop(stale)
        if replaced:
            logger.info(
                "%d chunks of changed documents were replaced; to keep other pieces of the same "
                "documents, give each index a collection= of its own",
                replaced,
            )
        return given, replaced

    def forget(self, document_id: str, collection: str | None, kept: Collection[Chunk]) -> Evicted:
        """Forget a document's chunks except ``kept``; returns for how many KV was dropped.

        KV is dropped first: on a full disk, changing the registry needs that room.
        """
        self.registry.refresh()
        found = self.registry.document(document_id, collection)
        chunks = [chunk for chunk in found if chunk not in kept]
        dropped = self._drop(chunks, besides=frozenset(chunks))
        self.registry.discard_many(chunks)
        return dropped + self._drop(chunks)  # KV that others stored in between

    def bare(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return chunks without their context, as far as prompts need that KV too.

        They need it for texts with several contexts, and for all if contexts must be confirmed.
        """
        if self._lead_in.name != "document":
            return []
        texts = dict.fromkeys(chunk.text for chunk in chunks if chunk.context)
        every = not self._lead_in.unconfirmed_context
        return [Chunk(text) for text in texts if every or self.registry.is_ambiguous(text)]

    def has(self, chunk: Chunk) -> bool:
        """Whether this chunk is registered, with its document and context or as a bare one."""
        variants = self.registry.variants(chunk.text)
        return chunk in variants or (bool(variants) and chunk == Chunk(chunk.text))

    def drop_forgotten(self, chunks: Iterable[Chunk]) -> int:
        """Drop the KV of just stored chunks that another writer has forgotten meanwhile.

        The other writer could not: it dropped KV before these chunks were stored.
        """
        self.registry.refresh()
        return self._drop(chunks)

    def removed_by_others(self, chunks: Iterable[Chunk]) -> list[KVKey]:
        """Return the keys of chunks that another writer forgot, and no registered chunk shares."""
        alone = [chunk for chunk in chunks if not self._is_shared(chunk, ())]
        return self._keys([*alone, *self._others_alone(alone, ())])

    def unregistered(self, keys: Iterable[KVKey]) -> list[KVKey]:
        """Return those keys that no registered chunk has."""
        self.registry.refresh()
        chunks = self.registry.chunks()
        known = set(self._keys([*chunks, *self.bare(chunks)]))
        return [key for key in keys if key not in known]

    def hinted(self, hints: Iterable[Chunk | str]) -> list[KVKey]:
        """Return the keys of hinted chunks, and of all chunks of hinted documents."""
        chunks = [
            chunk
            for hint in hints
            for chunk in (self.registry.document(hint) if isinstance(hint, str) else (hint,))
        ]
        return self._keys(chunks)

    def _drop(self, chunks: Iterable[Chunk], besides: Collection[Chunk] = ()) -> Evicted:
        """Drop the KV of chunks that no registered chunk shares, ``besides`` aside."""
        alone = [chunk for chunk in chunks if not self._is_shared(chunk, besides)]
        return self._evict(alone, self._others_alone(alone, besides))

    def _forget_priors(self, chunks: Iterable[Chunk]) -> Evicted:
        """Drop KV without a context in its key, for chunks of documents with boundaries.

        Its prior may depend on text that a new boundary hides.
        """
        if self._lead_in.name == "document":
            return Evicted()
        return self._evict(chunks, ())

    def _evict(self, chunks: Iterable[Chunk], others: Iterable[Chunk]) -> Evicted:
        """Drop the KV of chunks and of others; returns how many of the chunks were stored."""
        keys = self._keys(chunks)
        besides = set(self._keys(others)) - set(keys)
        also = self._backend._evict(list(besides)) if besides else Evicted()
        return self._backend._evict(keys) + Evicted(0, also.pending, is_noted=also.is_noted)

    def _keys(self, chunks: Iterable[Chunk]) -> list[KVKey]:
        return [self._lead_in.key(chunk) for chunk in chunks]

    def _others_alone(self, chunks: Sequence[Chunk], besides: Collection[Chunk]) -> list[Chunk]:
        """Return chunks without their context, whose KV no registered chunk needs.

        besides: chunks that do not count.
        """
        others = [Chunk(chunk.text) for chunk in chunks if chunk.context]
        return [one for one in others if not self._is_shared(one, besides)]

    def _is_shared(self, chunk: Chunk, besides: Collection[Chunk]) -> bool:
        key = self._lead_in.key(chunk)
        others = [one for one in self.registry.variants(chunk.text) if one not in besides]
        return self._needs_bare(chunk, others) or any(
            self._lead_in.key(one) == key for one in others
        )

    def _needs_bare(self, chunk: Chunk, variants: Collection[Chunk]) -> bool:
        """Whether a chunk has no context, and prompts need its KV for variants that have."""
        if chunk.context or self._lead_in.name != "document":
            return False
        return differ(variants) or (bool(variants) and not self._lead_in.unconfirmed_context)


def chunks_of(item: Item) -> list[Chunk]:
    """Return the chunks of an item."""
    if isinstance(item, Document):
        return item.to_chunks()
    return [Chunk(item) if isinstance(item, str) else item]


def whole_documents(chunks: Sequence[Chunk], size: int) -> Iterable[list[Chunk]]:
    """Split chunks into parts of at least ``size``, never between chunks of one document."""
    part: list[Chunk] = []
    for chunk in chunks:
        if len(part) >= size and not chunk.context:
            yield part
            part = []
        part.append(chunk)
    if part:
        yield part
