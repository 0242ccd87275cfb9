"""The form of a passage behind a space, where it begins with other tokens than by itself.

A tokenizer joins a space with the word behind it. Most words are one token with the space and one
without; a rare name may be several, all of them others. Whoever looks for a passage by its tokens
then misses them in a prompt that has the passage in a list, after a label or in a line of text.
"""

from __future__ import annotations

from cacheblend_rag.text.encoder import PromptEncoder, TokenIds

MOST_LOST = 2
"""If a space before a passage changes more leading tokens than this, the passage is also stored
with the space."""
MOST_OTHER = 8
"""If the space changes more leading tokens than this, the passage is stored without it only."""
LEAST_RUN = 32
"""Tokens of the shortest passage, or part of one, that is found by its tokens."""
HEAD = 128
"""Characters of a passage that are compared. What follows is taken to have the same tokens."""


def behind_space(text: str, encoder: PromptEncoder) -> str | None:
    """Return ``" " + text`` if it is worth storing beside ``text``, else None.

    It is if the two tokenizations differ in more than `MOST_LOST` leading tokens. With fewer, the
    tokens of ``text`` match nearly all of it in a prompt; with more than `MOST_OTHER`, the two
    would not be recognized as one passage.
    """
    head = text[:HEAD]
    spaced, own = encoder.uncached_chunk(f" {head}"), encoder.uncached_chunk(head)
    same = _same_at_end(spaced, own)
    if len(spaced) - same <= MOST_LOST or max(len(spaced), len(own)) - same > MOST_OTHER:
        return None
    return f" {text}"


def _same_at_end(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the longest common suffix of two token sequences."""
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    shorter = min(len(one), len(other))
    return next((count for count, (here, there) in pairs if here != there), shorter)
