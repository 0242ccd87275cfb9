"""Cuts a long document into overlapping chunks of whole pieces.

A document is first cut into small pieces, at paragraphs, lines, sentences and words. A chunk is a
run of whole pieces, and so is the text that two chunks share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.settings.base import Count, Positive, Settings

PIECE_TOKENS = 64
PIECES_IN_CHUNK, PIECES_IN_OVERLAP = 8, 4
"""A chunk, and the overlap of two chunks, hold at least so many pieces."""
MOST_CHARACTERS = 40
"""Characters per token of the limit above which a text is split without tokenizing it first."""
PARAGRAPH, LINE = r"\n\s*\n", r"\n"
SENTENCE = r"(?<=[.!?])\s|(?<=[\u3002\uff01\uff1f\uff1b])"
WORD = r"\s|(?<=[\uff0c\u3001])"
BREAKS = tuple(map(re.compile, (PARAGRAPH, LINE, SENTENCE, WORD)))
"""Where a piece may begin: a paragraph, a line, a sentence, a word."""

CountTokens = Callable[[str], int]


class AnalysisPlan(Settings):
    """The sizes of chunks and windows of a long document, and how answers are combined."""

    _noun: ClassVar[str] = "setting of a long document"

    chunk_tokens: Annotated[int, Field(ge=16)] = 2048
    """Most tokens of a chunk."""
    overlap: Count = 256
    """Most tokens that a chunk repeats of the one before it, up to half a chunk."""
    window: Positive = 5
    """Most chunks of a prompt."""
    combine: Literal["map_reduce", "refine"] = "map_reduce"
    """Join the windows' answers at the end, or have each window refine the last one."""

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.overlap > self.chunk_tokens // 2:
            raise ConfigError(
                f"overlap={self.overlap} must be at most half of chunk_tokens={self.chunk_tokens}"
            )
        return self

    @property
    def piece_tokens(self) -> int:
        """Maximum tokens of a piece, the unit that chunks and overlaps consist of."""
        shared = self.overlap // PIECES_IN_OVERLAP if self.overlap else PIECE_TOKENS
        return max(1, min(PIECE_TOKENS, shared, self.chunk_tokens // PIECES_IN_CHUNK))


class Span(NamedTuple):
    """Characters [start, end) of a document, and how many tokens they have by themselves."""

    start: int
    end: int
    tokens: int


def cut_document(text: str, plan: AnalysisPlan, count: CountTokens) -> list[Span]:
    """Cut a document into chunks; white space at a chunk's edges is left out.

    Raises PromptError when there is nothing but white space.
    """
    pieces = list(_pieces(text, (0, len(text)), 0, plan.piece_tokens, count))
    chunks: list[Span] = []
    first = end = 0
    while end < len(pieces):
        done, room = end, plan.chunk_tokens - sum(piece.tokens for piece in pieces[first:end])
        while end < len(pieces) and (end == done or pieces[end].tokens <= room):
            room -= pieces[end].tokens
            end += 1
        whole = text[pieces[first].start : pieces[end - 1].end]
        shown = whole.strip()
        start = pieces[first].start + len(whole) - len(whole.lstrip())
        if shown and not (chunks and start + len(shown) <= chunks[-1].end):
            chunks.append(Span(start, start + len(shown), count(shown)))
        least, first, room = first + 1, end, plan.overlap
        while first > least and pieces[first - 1].tokens <= room:
            first -= 1
            room -= pieces[first].tokens
    if not chunks:
        raise PromptError("the document is empty: give a text")
    return chunks


def _pieces(
    text: str, span: tuple[int, int], level: int, limit: int, count: CountTokens
) -> Iterator[Span]:
    """Split a span at the separators of a level in BREAKS.

    Parts over the limit are split at the next level, and behind the last one in halves; a single
    character is a piece always.
    """
    start, end = span
    size = end - start
    if level and (size <= limit * MOST_CHARACTERS or size == 1):
        tokens = count(text[start:end])
        if tokens <= limit or size == 1:
            yield Span(start, end, tokens)
            return
    points: Iterable[int] = (start, (start + end) // 2, end)
    if level < len(BREAKS):
        found = (match.start() for match in BREAKS[level].finditer(text, start + 1, end))
        points = (start, *found, end)
    for part in pairwise(points):
        if part[0] < part[1]:
            yield from _pieces(text, part, min(level + 1, len(BREAKS)), limit, count)
