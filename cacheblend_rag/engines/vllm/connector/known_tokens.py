"""The stored chunks of one namespace, found by their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from cacheblend_rag.engines.vllm.connector.found_chunk import FoundChunk, Variant, continues
from cacheblend_rag.text.behind_space import LEAST_RUN, MOST_OTHER
from cacheblend_rag.text.token_index import TokenIndex


@dataclass(slots=True)
class KnownTokens:
    """Chunks by their ids: their tokens, and what is stored of each."""

    index: TokenIndex[str] = field(default_factory=lambda: TokenIndex(LEAST_RUN))
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)

    def form_of(self, one: Variant) -> str:
        """Return the id of the chunk whose form behind a space this is, or ""."""
        return one.follows if self._chunk_of(one) else ""

    def continues(self, one: Variant, before: FoundChunk | None) -> bool:
        """Whether the document before a chunk stands before it in the prompt, up to this chunk.

        A form behind a space has the document of its chunk.
        """
        return continues(self._chunk_of(one) or one, before)

    def _chunk_of(self, form: Variant) -> Variant | None:
        """Return the chunk whose form behind a space this is, or None.

        A form has its chunk's context and lead-in. The chunk before another in their document has
        another context, however much alike the two may be.
        """
        if not form.follows:
            return None
        name = replace(form.name, chunk_id=form.follows)
        chunks = (one for one in self.variants.get(form.follows, ()) if one.name == name)
        chunk = next(chunks, None)
        if chunk is None or not self._are_forms(form.name.chunk_id, form.follows):
            return None
        return chunk

    def _are_forms(self, one: str, other: str) -> bool:
        """Whether two chunks have the same tokens but for a few at their beginning."""
        try:
            here, there = self.index.tokens(one), self.index.tokens(other)
        except KeyError:  # unknown, or forgotten this very moment
            return False
        same = max(here.size, there.size) - MOST_OTHER
        is_long = 0 < same <= min(here.size, there.size)
        return is_long and np.array_equal(here[-same:], there[-same:])
