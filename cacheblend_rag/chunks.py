"""Chunks and the registry that finds known chunks, verbatim, in any prompt text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage as indexed.

    text: the passage, verbatim as it will stand in prompts.
    document_id: the document it was cut from, or None when it stands alone.
    context: what precedes it in that document, as (piece, ...) where each piece is one tokenization
        unit (an earlier chunk's text or the separator between two chunks). Empty for the first
        chunk of a document and for chunks that stand alone.
    """

    text: str
    document_id: str | None = None
    context: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A document cut into chunks, in order, joined by ``separator``."""

    document_id: str
    chunks: tuple[str, ...]
    separator: str = "\n\n"

    def to_chunks(self) -> list[Chunk]:
        """Return the chunks, each with the pieces of the document that precede it."""
        found: list[Chunk] = []
        pieces: list[str] = []
        for text in self.chunks:
            found.append(Chunk(text, self.document_id, tuple(pieces)))
            pieces += [text, self.separator]
        return found


__all__ = ["Chunk", "Document", "Sequence"]
