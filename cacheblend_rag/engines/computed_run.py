"""Chunks of one document that were precomputed together, as the catalogue tells of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cacheblend_rag.engines.catalog import CatalogChunk, Name, same_lead_in
from cacheblend_rag.engines.found_chunk import Vocabulary
from cacheblend_rag.engines.variants import chain
from cacheblend_rag.prefill.lead_in import LeadInId
from cacheblend_rag.text.token_index import TokenIndex


@dataclass(frozen=True, slots=True)
class ComputedRun:
    """Chunks of one document that were precomputed together.

    tokens: of the lead-in, and of the document from ``context_start`` on. spans: [start, end) of
    each chunk in them. keys: the chunk id and the context id of each. fresh, lost: indices of the
    chunks whose KV was computed just now, and of those whose KV is not stored. conversation: the
    key of the one whose turns they are, or "".
    """

    lead_in: LeadInId
    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]
    keys: Sequence[tuple[str, str]]
    context_start: int = 0
    fresh: Collection[int] = ()
    lost: Collection[int] = ()
    conversation: str = ""

    def stored(
        self, namespace: str, index: TokenIndex[str], vocabulary: Vocabulary
    ) -> Iterator[tuple[int, CatalogChunk]]:
        """Yield the chunks that are stored and long enough to be found, with their places.

        The chain of what is before a chunk is None where there is other text between.

        Args:
            namespace: of the chunks.
            index: of the chunks that are known there.
            vocabulary: tells what may stand between two chunks.
        """
        lead, tokens = same_lead_in(self.lead_in), self.tokens
        context, behind = self._context(index, vocabulary), self.spans[0][0]
        for place, ((start, end), (own_id, context_id)) in enumerate(
            zip(self.spans, self.keys, strict=True)
        ):
            own = np.asarray(tokens[start:end], dtype=np.uint32)
            name = Name(namespace, own_id, context_id, lead)
            if not vocabulary.is_blank(tokens[behind:start]):
                context = None
            if place not in self.lost and len(own) >= index.least:
                follows = (context or "") if context_id else ""
                yield place, CatalogChunk(name, own, follows)
            context, behind = None if context is None else chain(context, own_id), end

    def _context(self, index: TokenIndex[str], vocabulary: Vocabulary) -> str | None:
        """Return the ``chain`` of the known chunks before the first one.

        None if there is other text, too.
        """
        first = self.spans[0][0]
        context, end = "", self.context_start
        for one in index.find(self.tokens, self.context_start, first):
            if one.tokens < len(index.tokens(one.name)):
                continue
            if not vocabulary.is_blank(self.tokens[end : one.start]):
                return None
            context, end = chain(context, one.name), one.end
        return context if vocabulary.is_blank(self.tokens[end:first]) else None
