"""Order: how retrieved passages stand in a prompt; and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cacheblend_rag.text.chunk import Chunk


@dataclass(frozen=True)
class Source:
    """A retrieved passage: chunk ``position`` (from 0) of its document, and its cosine."""

    chunk: Chunk
    position: int
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "source": self.chunk.document_id,
            "chunk": self.position,
            "score": self.score,
            "text": self.chunk.text,
        }


class Order(StrEnum):
    """How passages stand in the prompt."""

    SCORE = "score"
    DOCUMENT = "document"
    REVERSE = "reverse"

    def arrange(self, found: Sequence[Source]) -> list[Source]:
        """Put passages, given best first, in this order."""
        if self is Order.REVERSE:
            return list(reversed(found))
        if self is Order.SCORE:
            return list(found)
        documents = list(dict.fromkeys(source.chunk.document_id for source in found))
        return sorted(
            found, key=lambda source: (documents.index(source.chunk.document_id), source.position)
        )
