"""Which stored KV belongs to which registered chunks: what may be dropped, and what is shared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.registry import ChunkRegistry, differ

Item = Chunk | Document | str
"""Items to precompute or register; a string is a chunk that stands alone."""


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Keys of KV that no registered chunk needs: chunks' own, and of the same texts alone."""

    keys: Sequence[KVKey]
    bare: Sequence[KVKey] = ()


@dataclass(frozen=True, slots=True)
class KnownChunks:
    """A registry's chunks, and the keys that their KV has after a lead-in."""

    registry: ChunkRegistry
    lead_in: LeadIn

    def has(self, chunk: Chunk) -> bool:
        """Whether this chunk is registered, with its document and context or as a bare one."""
        variants = self.registry.variants(chunk.text)
        return chunk in variants or (bool(variants) and chunk == Chunk(chunk.text))

    def replace(self, documents: Iterable[tuple[str, str]], chunks: Sequence[Chunk]) -> list[Chunk]:
        """Register chunks in place of their documents' earlier ones; returns those forgotten.

        documents: ids and collections.
        """
        current = set(chunks)
        stale = [c for one in documents for c in self.registry.document(*one) if c not in current]
        if stale:
            self.registry.discard_many(stale)
        self.registry.add_many(chunks)
        return stale

    def keys(self, chunks: Iterable[Chunk]) -> list[KVKey]:
        """Return the keys of chunks."""
        return [self.lead_in.key(chunk) for chunk in chunks]

    def hinted(self, hints: Iterable[Chunk | str]) -> list[KVKey]:
        """Return the keys of hinted chunks, and of all chunks of hinted documents."""
        found: Iterator[Sequence[Chunk]] = (
            self.registry.document(hint) if isinstance(hint, str) else (hint,) for hint in hints
        )
        return self.keys(chunk for chunks in found for chunk in chunks)

    def bare(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return, without context, those chunks whose KV some prompts can only use so."""
        texts = dict.fromkeys(chunk.text for chunk in chunks if chunk.context)
        return [Chunk(text) for text in texts if self._needs_bare(self.registry.variants(text))]

    def unregistered(self, keys: Iterable[KVKey]) -> list[KVKey]:
        """Return those keys that no registered chunk has."""
        self.registry.refresh()
        chunks = self.registry.chunks()
        known = set(self.keys([*chunks, *self.bare(chunks)]))
        return [key for key in keys if key not in known]

    def unneeded(self, chunks: Iterable[Chunk], besides: Collection[Chunk] = ()) -> Unneeded:
        """Return the keys of those chunks whose KV no registered chunk needs.

        besides: registered chunks that do not count.
        """
        keys: list[KVKey] = []
        bare: list[KVKey] = []
        for chunk in chunks:
            key, alone = self.keys([chunk, Chunk(chunk.text)])
            needed = self._needed(chunk.text, besides)
            if key in needed:
                continue
            keys.append(key)
            if alone not in needed:
                bare.append(alone)
        return Unneeded(keys, list(set(bare) - set(keys)))

    def _needed(self, text: str, besides: Collection[Chunk]) -> set[KVKey]:
        """Return the keys of the KV that prompts use for a text."""
        variants = [one for one in self.registry.variants(text) if one not in besides]
        return set(self.keys([*variants, Chunk(text)] if self._needs_bare(variants) else variants))

    def _needs_bare(self, variants: Collection[Chunk]) -> bool:
        """Whether prompts need the KV of a text without context, given its variants.

        They need it if these have several contexts, and always if contexts must be confirmed.
        """
        always = bool(variants) and not self.lead_in.unconfirmed_context
        return self.lead_in.name == "document" and (always or differ(variants))


def chunks_of(item: Item) -> list[Chunk]:
    """Return the chunks of an item."""
    if isinstance(item, Document):
        return item.to_chunks()
    return [Chunk(item) if isinstance(item, str) else item]


def whole_documents(chunks: Sequence[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Split chunks into parts of at least ``size``, never between chunks of one document."""
    part: list[Chunk] = []
    for chunk in chunks:
        if len(part) >= size and not chunk.context:
            yield part
            part = []
        part.append(chunk)
    if part:
        yield part
