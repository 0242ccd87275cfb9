"""The form of a passage behind a space, where it begins with other tokens than by itself.

A tokenizer joins a space with the word behind it. Most words are one token with the space and one
without; a rare name may be several, all of them others. Whoever looks for a passage by its tokens
then misses them in a prompt that has the passage in a list, after a label or in a line of text.
"""

from __future__ import annotations

from cacheblend_rag.text.encoder import PromptEncoder, TokenIds

MOST_LOST = 2
"""First tokens of a passage behind a space that may be others than its own."""
HEAD = 128
"""Characters of a passage that are compared: a space before it changes no tokens beyond."""


def behind_space(text: str, encoder: PromptEncoder) -> str | None:
    """Return a passage with a space before it, if it begins with more than two other tokens there.

    Else return None: whoever knows the tokens of the passage alone finds nearly all of it.
    """
    head = text[:HEAD]
    spaced = encoder.broken_up(f" {head}")
    own = encoder.broken_up(head)
    return f" {text}" if len(spaced) - _same_at_end(spaced, own) > MOST_LOST else None


def _same_at_end(one: TokenIds, other: TokenIds) -> int:
    """Return how many tokens are the same at the end of both."""
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    shorter = min(len(one), len(other))
    return next((count for count, (here, there) in pairs if here != there), shorter)
