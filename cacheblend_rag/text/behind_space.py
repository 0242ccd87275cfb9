"""The form of a passage behind a space, where it begins with other tokens than by itself.

A tokenizer joins a space with the word behind it. Most words are one token with the space and one
without; a rare name may be several, all of them others. Whoever looks for a passage by its tokens
then misses them in a prompt that has the passage in a list, after a label or in a line of text.
"""

from __future__ import annotations

from cacheblend_rag.text.encoder import PromptEncoder, TokenIds

MOST_LOST = 2
"""First tokens of a passage behind a space that may be others than its own."""
MOST_OTHER = 8
"""First tokens in which a passage and its form differ, at most."""
LEAST_RUN = 32
"""Tokens of the shortest passage, or part of one, that is found by its tokens."""
HEAD = 128
"""Characters of a passage that are compared. What follows is taken to have the same tokens."""


def behind_space(text: str, encoder: PromptEncoder) -> str | None:
    """Return a passage with a space before it, if it begins with more than two other tokens there.

    Else return None: whoever knows the tokens of the passage alone finds nearly all of it. Also
    return None if so many tokens are others that the two would not be known to be one passage.
    """
    head = text[:HEAD]
    spaced, own = encoder.uncached_chunk(f" {head}"), encoder.uncached_chunk(head)
    same = _same_at_end(spaced, own)
    if len(spaced) - same <= MOST_LOST or max(len(spaced), len(own)) - same > MOST_OTHER:
        return None
    return f" {text}"


def _same_at_end(one: TokenIds, other: TokenIds) -> int:
    """Return how many tokens are the same at the end of both."""
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    shorter = min(len(one), len(other))
    return next((count for count, (here, there) in pairs if here != there), shorter)
