"""Orders retrieved passages for a prompt.

Passages have different types (a Source here, a node or a Document in frameworks), so callers pass
functions that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any, TypeVar

from cacheblend_rag.text.chunk import Chunk

Passage = TypeVar("Passage")


class PassageOrder(StrEnum):
    """The order of passages in a prompt.

    Attributes:
        SCORE: best first.
        DOCUMENT: passages of one document together and in its order, the document with the best
            passage first.
        REVERSE: best last, next to the question.
    """

    SCORE = "score"
    DOCUMENT = "document"
    REVERSE = "reverse"

    def arrange(
        self,
        found: Sequence[Passage],
        *,
        document_of: Callable[[Passage], Hashable],
        positions_of: Callable[[Sequence[Passage]], Sequence[int]],
    ) -> list[Passage]:
        """Put passages in this order.

        Args:
            found: the passages, best first.
            document_of: returns a passage's document; None is a document of that passage alone.
            positions_of: returns the positions of passages, given best first, in their common
                document. At equal positions the better one stays first.

        Returns:
            The same passages, all of them.
        """
        if self is PassageOrder.SCORE:
            return list(found)
        if self is PassageOrder.REVERSE:
            return list(reversed(found))
        documents: dict[Hashable, list[Passage]] = {}
        for passage in found:
            name = document_of(passage)
            documents.setdefault(object() if name is None else name, []).append(passage)
        ordered: list[Passage] = []
        for together in documents.values():
            placed = zip(positions_of(together), together, strict=True)
            ordered += [passage for _, passage in sorted(placed, key=itemgetter(0))]
        return ordered


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
