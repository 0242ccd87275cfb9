"""Runs: where in a prompt's tokens a chunk's own tokens stand.

A tokenizer reads a prompt as one text, so the tokens at a chunk's edges may be others there than
those of the chunk by itself: a full stop and the blank line behind it may be one token. What lies
between the edges is the same, and is found here by comparing tokens, which every tokenizer allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLACK = 16
"""Tokens by which a chunk may stand earlier or later than the texts before it make expect."""
EDGES = 6
"""A run may lack this many edge tokens (both edges together) however short its chunk is."""
LONG = 64
"""Tokens of a chunk from which on a run that lacks its edges alone is taken where it is found."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, end) of a prompt are a chunk's tokens from its token number ``skip`` on."""

    start: int
    end: int
    skip: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in the run."""
        return self.end - self.start


def find_run(tokens: Ids, chunk: Ids, near: int, after: int) -> Run | None:
    """Return the longest run of a chunk's tokens in a prompt; None where hardly any are the same.

    A run that is off the expected place by some tokens has to be longer by more than as many.

    Args:
        tokens: (tokens,) of the prompt.
        chunk: (tokens,) of the chunk by itself.
        near: where the chunk's first token is expected in the prompt.
        after: the run begins here at the earliest.
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
    """Whether no other place is worth a look: only text that repeats itself could have more."""
    return tokens == whole or (whole > LONG and whole - tokens <= EDGES)


def _longest(tokens: Ids, chunk: Ids, start: int, after: int) -> Run | None:
    """Return the longest run if the chunk's first token stands, or would stand, at ``start``."""
    low, high = max(start, after), min(start + chunk.size, tokens.size)
    if high <= low:
        return None
    same = tokens[low:high] == chunk[low - start : high - start]
    edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
    if not edges.size:
        return None
    begins, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - begins))
    first, last = low + int(begins[longest]), low + int(ends[longest])
    return Run(first, last, first - start)
