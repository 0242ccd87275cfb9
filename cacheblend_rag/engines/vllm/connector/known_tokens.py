"""The stored chunks of one namespace, found by their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from cacheblend_rag.engines.vllm.connector.found_chunk import FoundChunk, Variant, continues
from cacheblend_rag.text.token_index import TokenIndex

LEAST_RUN = 32
"""Tokens of the shortest part of a chunk that is found."""
MOST_OTHER = 8
"""First tokens in which two forms of a chunk differ, at most."""


@dataclass(slots=True)
class KnownTokens:
    """Chunks by their ids: their tokens, and what is stored of each."""

    index: TokenIndex[str] = field(default_factory=lambda: TokenIndex(LEAST_RUN))
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)

    def form_of(self, one: Variant) -> str:
        """Return the id of the chunk whose form behind a space this is, or ""."""
        return one.follows if self._are_forms(one.name.chunk_id, one.follows) else ""

    def continues(self, one: Variant, before: FoundChunk | None) -> bool:
        """Whether the document before a chunk stands before it in the prompt, up to this chunk.

        A form behind a space has the document of its chunk.
        """
        if not (of := self.form_of(one)):
            return continues(one, before)
        chunk = replace(one.name, chunk_id=of)
        return any(
            continues(other, before) for other in self.variants.get(of, ()) if other.name == chunk
        )

    def _are_forms(self, one: str, other: str) -> bool:
        """Whether two chunks have the same tokens but for a few at their beginning."""
        if not other:
            return False
        try:
            here, there = self.index.tokens(one), self.index.tokens(other)
        except KeyError:  # unknown, or forgotten this very moment
            return False
        same = max(here.size, there.size) - MOST_OTHER
        is_long = 0 < same <= min(here.size, there.size)
        return is_long and np.array_equal(here[-same:], there[-same:])
