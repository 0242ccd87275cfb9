"""Finds a chunk's own tokens as a run in a prompt's tokens.

A tokenizer reads a prompt as one text, so the tokens at a chunk's edges may differ from those of
the chunk by itself: a full stop and the blank line after it may be one token. The tokens between
the edges are the same, and are found by comparing tokens, which works for every tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLACK = 16
"""How many tokens a chunk may be off the position expected from the texts before it."""
EDGES = 6
"""A run may lack this many edge tokens (both edges together) however short its chunk is."""
LONG = 64
"""From this many tokens on, a run that lacks only its edges is accepted where it is found."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, end) of a prompt equal a chunk's tokens from index ``skip`` on."""

    start: int
    end: int
    skip: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in the run."""
        return self.end - self.start


def find_run(tokens: Ids, chunk: Ids, near: int, after: int) -> Run | None:
    """Return the longest run of a chunk's tokens in a prompt; None if hardly any are the same.

    A run that is n tokens off the expected position must be more than n tokens longer to win.

    Args:
        tokens: (tokens,) of the prompt.
        chunk: (tokens,) of the chunk by itself.
        near: the expected position of the chunk's first token in the prompt.
        after: the earliest position at which the run may begin.
    """
    best: Run | None = None
    most = 0
    for shift in sorted(range(-SLACK, SLACK + 1), key=abs):
        if best is not None and _is_enough(best.tokens, chunk.size):
            break
        found = _longest(tokens, chunk, near + shift, after)
        if found is not None and (best is None or found.tokens - abs(shift) > most):
            best, most = found, found.tokens - abs(shift)
    if best is None or best.tokens < min(chunk.size / 2, max(chunk.size - EDGES, 1)):
        return None
    return best


def _is_enough(tokens: int, whole: int) -> bool:
    """Whether the search may stop: only in repetitive text could another run be longer."""
    return tokens == whole or (whole > LONG and whole - tokens <= EDGES)


def _longest(tokens: Ids, chunk: Ids, start: int, after: int) -> Run | None:
    """Return the longest run if the chunk's first token is, or would be, at ``start``."""
    low, high = max(start, after), min(start + chunk.size, tokens.size)
    if high <= low:
        return None
    same = np.zeros(high - low + 2, dtype=np.bool_)
    same[1:-1] = tokens[low:high] == chunk[low - start : high - start]
    edges = np.flatnonzero(same[1:] != same[:-1])
    if not edges.size:
        return None
    begins, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - begins))
    first, last = low + int(begins[longest]), low + int(ends[longest])
    return Run(first, last, first - start)
