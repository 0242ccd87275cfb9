"""Cuts a long document into overlapping chunks, and lays a sliding window of chunks over it.

A document is first cut into small pieces, at paragraphs, lines, sentences and words. A chunk is a
run of whole pieces, and so is the text that two chunks share. Pieces are also what stands before a
chunk in its document (``Chunk.context``): chunks hold references to them, no copies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import get_args

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.rag.document_report import Combine
from cacheblend_rag.text.chunk import Chunk, Context

FEWEST_CHUNK_TOKENS = 16
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


@dataclass(frozen=True)
class AnalysisPlan:
    """The sizes of chunks and windows, and how answers are combined.

    chunk_tokens: the most tokens of a chunk. overlap: the most that it repeats of the one before
    it. window: the most chunks of a prompt. Raises ConfigError when one is out of range.
    """

    chunk_tokens: int = 2048
    overlap: int = 256
    window: int = 5
    combine: Combine = "map_reduce"

    def __post_init__(self) -> None:
        _check_whole("chunk_tokens", self.chunk_tokens, FEWEST_CHUNK_TOKENS)
        _check_whole("overlap", self.overlap, 0)
        _check_whole("window", self.window, 1)
        if self.overlap > self.chunk_tokens // 2:
            raise ConfigError(
                f"overlap={self.overlap} must be at most half of chunk_tokens={self.chunk_tokens}"
            )
        if self.combine not in get_args(Combine):
            choices = ", ".join(get_args(Combine))
            raise ConfigError(f"combine={self.combine!r:.100} must be one of {choices}")

    @property
    def piece_tokens(self) -> int:
        """Maximum tokens of a piece, the unit that chunks and overlaps consist of."""
        shared = self.overlap // PIECES_IN_OVERLAP if self.overlap else PIECE_TOKENS
        return max(1, min(PIECE_TOKENS, shared, self.chunk_tokens // PIECES_IN_CHUNK))


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters [start, end) of a document, and how many tokens they have by themselves."""

    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """A chunk, and its place: characters [start, end) of the document. tokens: its length."""

    chunk: Chunk
    start: int
    end: int
    tokens: int


@dataclass(frozen=True)
class CutDocument:
    """A document's chunks, in order. tokens: of the document, as the sum of its pieces."""

    document_id: str
    characters: int
    tokens: int
    chunks: tuple[DocumentChunk, ...]


def cut_document(
    text: str,
    plan: AnalysisPlan,
    count: CountTokens,
    context_tokens: Callable[[int], int],
    *,
    document_id: str,
    collection: str,
) -> CutDocument:
    """Cut a document into chunks; white space at a chunk's edges is left out.

    context_tokens: returns how many tokens of the document may stand before a chunk of so many
    tokens while its KV is computed.

    Raises PromptError when there is nothing but white space.
    """
    pieces = list(cut_pieces(text, plan.piece_tokens, count))
    texts = [text[piece.start : piece.end] for piece in pieces]
    chunks: list[DocumentChunk] = []
    for first, end in chunk_runs([piece.tokens for piece in pieces], plan):
        whole = text[pieces[first].start : pieces[end - 1].end]
        shown = whole.strip()
        blank = whole[: len(whole) - len(whole.lstrip())]
        start = pieces[first].start + len(blank)
        if not shown or (chunks and start + len(shown) <= chunks[-1].end):
            continue
        tokens = count(shown)
        room = context_tokens(tokens) - (count(blank) if blank else 0)
        context = _context(pieces[:first], texts, room)
        chunk = Chunk(
            shown, document_id, context.then(blank) if context and blank else context, collection
        )
        chunks.append(DocumentChunk(chunk, start, start + len(shown), tokens))
    if not chunks:
        raise PromptError("the document is empty: give a text")
    return CutDocument(document_id, len(text), sum(piece.tokens for piece in pieces), tuple(chunks))


def cut_pieces(text: str, limit: int, count: CountTokens) -> Iterator[Piece]:
    """Cut a text into pieces of at most ``limit`` tokens; a single character is one always."""
    held: Piece | None = None
    for piece in _Cutter(text, limit, count).cut(0, len(text), 0):
        if held is None:
            held = piece
        elif held.tokens + piece.tokens <= limit:
            held = Piece(held.start, piece.end, held.tokens + piece.tokens)
        else:
            yield held
            held = piece
    if held is not None:
        yield held


@dataclass(frozen=True)
class _Cutter:
    text: str
    limit: int
    count: CountTokens

    def cut(self, start: int, end: int, level: int) -> Iterator[Piece]:
        """Split characters [start, end) at the separators of a level in BREAKS.

        Parts over the limit are split at the next level, and behind the last one in halves.
        """
        size = end - start
        if level and (size <= self.limit * MOST_CHARACTERS or size == 1):
            tokens = self.count(self.text[start:end])
            if tokens <= self.limit or size == 1:
                yield Piece(start, end, tokens)
                return
        if level < len(BREAKS):
            found = (match.start() for match in BREAKS[level].finditer(self.text, start + 1, end))
            points: Iterable[int] = [start, *found, end]
        else:
            points = (start, (start + end) // 2, end)
        for one, other in pairwise(points):
            if one < other:
                yield from self.cut(one, other, min(level + 1, len(BREAKS)))


def chunk_runs(tokens: Sequence[int], plan: AnalysisPlan) -> Iterator[tuple[int, int]]:
    """Yield the pieces [first, end) of each chunk; ``tokens``: of each piece."""
    first = end = 0
    while end < len(tokens):
        done, total = end, sum(tokens[first:end])
        while end < len(tokens) and (total + tokens[end] <= plan.chunk_tokens or end == done):
            total += tokens[end]
            end += 1
        yield first, end
        least, shared, first = first + 1, 0, end
        while first > least and shared + tokens[first - 1] <= plan.overlap:
            first -= 1
            shared += tokens[first]


def _context(pieces: Sequence[Piece], texts: Sequence[str], room: int) -> Context:
    """Return the last pieces that have at most ``room`` tokens together."""
    first = len(pieces)
    while first and pieces[first - 1].tokens <= room:
        first -= 1
        room -= pieces[first].tokens
    return Context.of(texts[first : len(pieces)])


def fitting_window(sizes: Sequence[int], window: int, room: int) -> int:
    """Return the most chunks, up to ``window``, that fit into a prompt wherever they stand.

    sizes: tokens of each chunk in a prompt. room: tokens of all chunks of a prompt. 0 if one alone
    does not fit.
    """
    ends = [0, *accumulate(sizes)]
    for width in range(min(window, len(sizes)), 0, -1):
        if max(end - start for start, end in zip(ends, ends[width:], strict=False)) <= room:
            return width
    return 0


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r:.100} must be a whole number of at least {least}")
