"""The stored chunks of one namespace, found by their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.engines.vllm.connector.found_chunk import Variant
from cacheblend_rag.text.behind_space import LEAST_RUN, MOST_OTHER
from cacheblend_rag.text.token_index import TokenIndex


@dataclass(slots=True)
class KnownTokens:
    """The stored chunks: an index from tokens to chunk ids, and the KV variants of each chunk."""

    index: TokenIndex[str] = field(default_factory=lambda: TokenIndex(LEAST_RUN))
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)

    def form_of(self, one: Variant) -> str:
        """Return the id of the chunk whose form behind a space this is, or ""."""
        return one.follows if self._chunk_of(one) else ""

    def context_of(self, one: Variant) -> str:
        """Return the ``chain`` of the chunks that a variant's KV was computed behind.

        A form behind a space has the context of its chunk.
        """
        return (self._chunk_of(one) or one).follows

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
        try:
            tokens = self.index.tokens(form.name.chunk_id)
        except KeyError:  # forgotten this very moment
            return None
        return chunk if self.is_form(tokens, form.follows) else None

    def is_form(self, tokens: NDArray[np.uint32], of: str) -> bool:
        """Whether tokens are those of a known chunk, but for a few at their beginning."""
        try:
            others = self.index.tokens(of)
        except KeyError:
            return False
        same = max(tokens.size, others.size) - MOST_OTHER
        is_long = 0 < same <= min(tokens.size, others.size)
        return is_long and np.array_equal(tokens[-same:], others[-same:])
