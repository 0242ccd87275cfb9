"""Finds chunks that a prompt holds in another form: other white space, or other words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
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


@dataclass(frozen=True)
class SimilarChunk:
    """A registered chunk that a prompt holds in another form.

    share: of its runs of three words, how much the prompt holds. registered, found: its text and
    the prompt's around the first difference.
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
    parts = [(text, _runs(text)) for text in texts if len(text.split()) >= LEAST_WORDS]
    distinct = list({chunk.text: chunk for chunk in chunks}.values()) if parts else []
    found = []
    for chunk in distinct[:MOST_CHUNKS]:
        own = _runs(chunk.text) if len(chunk.text.split()) >= LEAST_WORDS else set()
        for text, runs in parts:
            share = len(own & runs) / max(1, len(own))
            if share >= LEAST_SHARE and chunk.text not in text:
                found.append(_similar(chunk, text, share))
                break
    return tuple(found)


def _runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of words in a text, whatever their case and punctuation."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return set(zip(*(words[start:] for start in range(RUN)), strict=False))


def _similar(chunk: Chunk, text: str, share: float) -> SimilarChunk:
    """Align a chunk and a text by their first words in common; return both where they differ."""
    is_spaced = " ".join(chunk.text.split()) in " ".join(text.split())
    ours, theirs = (list(re.finditer(r"\S+", one)) for one in (chunk.text, text))
    a, b = ([word[0].casefold() for word in words] for words in (ours, theirs))
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    same = [block for block in matcher.get_matching_blocks() if block.size >= RUN]
    begins = theirs[max(0, same[0].b - same[0].a)].start() if same else 0
    there = text[begins:]
    pairs = enumerate(zip(chunk.text, there, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), 0)
    shown = slice(max(0, at - AROUND), at + AROUND)
    differs: Literal["white space", "text"] = "white space" if is_spaced else "text"
    return SimilarChunk(chunk.document_id, differs, share, chunk.text[shown], there[shown])
