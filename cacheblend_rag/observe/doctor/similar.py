"""Finds chunks that a prompt holds in another form: other white space, or other words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Literal

from cacheblend_rag.text.chunk import Chunk

LEAST_WORDS = 8
"""Shorter chunks are not searched for: a few words stand in many texts."""
LEAST_SHARE = 0.5
"""Share of a chunk's runs of three words that a text holds, for it to be the chunk, altered."""
MOST_CHUNKS = 20_000
RUN = 3
AROUND = 12
"""Characters of context of a shown difference."""

Run = tuple[str, ...]


@dataclass(frozen=True)
class SimilarChunk:
    """A registered chunk that a prompt holds in another form.

    Args:
        document_id: its document.
        differs: in white space alone, or in words or punctuation.
        share: of its runs of three words, how much the prompt holds; 1 if only white space differs.
        registered: its text around the first difference.
        found: the prompt's text there.
    """

    document_id: str | None
    differs: Literal["white space", "text"]
    share: float
    registered: str
    found: str


def similar_chunks(texts: Sequence[str], chunks: Iterable[Chunk]) -> tuple[SimilarChunk, ...]:
    """Return the chunks that texts hold in another form.

    texts: the parts of a prompt in which no chunk was found. chunks: all that might be there.
    """
    parts = [_Part(text) for text in texts if len(text.split()) >= LEAST_WORDS]
    if not parts:
        return ()
    distinct = {chunk.text: chunk for chunk in chunks}
    found: list[SimilarChunk] = []
    for text, chunk in list(distinct.items())[:MOST_CHUNKS]:
        words = text.split()
        if len(words) < LEAST_WORDS:
            continue
        for part in parts:
            one = part.spaced(chunk, words) or part.reworded(chunk)
            if one is not None:
                found.append(one)
                break
    return tuple(found)


class _Part:
    """A text of a prompt, with what searches need of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._line = " ".join(text.split())
        self._runs = _runs(text)

    def spaced(self, chunk: Chunk, words: Sequence[str]) -> SimilarChunk | None:
        """Return a chunk that stands here with other white space."""
        if " ".join(words) not in self._line or chunk.text in self.text:
            return None
        match = re.search(r"\s+".join(map(re.escape, words)), self.text)
        if match is None:  # it begins or ends within a word
            return None
        registered, found = _first_difference(chunk.text.strip(), match.group())
        return SimilarChunk(chunk.document_id, "white space", 1.0, registered, found)

    def reworded(self, chunk: Chunk) -> SimilarChunk | None:
        """Return a chunk of which most runs of words stand here."""
        runs = _runs(chunk.text)
        share = len(runs & self._runs) / max(1, len(runs))
        if share < LEAST_SHARE or chunk.text in self.text:
            return None
        registered, found = _first_other_words(chunk.text, self.text)
        return SimilarChunk(chunk.document_id, "text", share, registered, found)


def _runs(text: str) -> set[Run]:
    """Return all runs of words in a text, whatever their case and punctuation."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return set(zip(*(words[start:] for start in range(RUN)), strict=False))


def _first_difference(registered: str, found: str) -> tuple[str, str]:
    """Return both texts around the first character in which they differ."""
    pairs = zip(registered, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(registered), len(found)))
    start, end = max(0, at - AROUND), at + AROUND
    return registered[start:end], found[start:end]


def _first_other_words(registered: str, found: str) -> tuple[str, str]:
    """Return both texts around the first words in which they differ, inside what they share."""
    ours, theirs = registered.split(), found.split()
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    same = [block for block in matcher.get_matching_blocks() if block.size]
    if not same:
        return " ".join(ours[:RUN]), " ".join(theirs[:RUN])
    first, last = same[0], same[-1]
    if first.a:
        begins = max(0, first.b - first.a)
        return " ".join(ours[: first.a]), " ".join(theirs[begins : first.b])
    for before, after in pairwise(same):
        a, b = before.a + before.size, before.b + before.size
        if after.a > a or after.b > b:
            return " ".join(ours[a : after.a]), " ".join(theirs[b : after.b])[: 4 * AROUND]
    a, b = last.a + last.size, last.b + last.size
    return " ".join(ours[a : a + RUN]), " ".join(theirs[b : b + RUN])
