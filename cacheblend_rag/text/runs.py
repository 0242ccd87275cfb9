"""Finds a chunk's own tokens as a run in a prompt's tokens.

A tokenizer reads a prompt as one text, so the tokens at a chunk's edges may differ from those of
the chunk by itself: a full stop and the blank line after it may be one token. The tokens between
the edges are the same, and are found by comparing tokens, which works for every tokenizer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SLACK = 16
"""How many tokens a chunk may be off the position expected from the texts before it."""
EDGES = 6
"""A run may lack this many edge tokens (both edges together) however short its chunk is."""
LONG = 64
"""From this many tokens on, a run that lacks only its edges is accepted where it is found."""

Ids = NDArray[np.integer]


class Run(NamedTuple):
    """Tokens [start, end) of a prompt equal a chunk's tokens from index ``skip`` on."""

    start: int
    end: int
    skip: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in the run."""
        return self.end - self.start

    def part(self, first: int, stop: int) -> Run:
        """Return what tokens [first, stop) of the run are."""
        return Run(self.start + first, self.start + stop, self.skip + first)


def equal_runs(tokens: Ids, chunk: Ids, shift: int, *, after: int = 0, least: int = 1) -> list[Run]:
    """Return where a prompt has a chunk's tokens if the chunk's first token is placed at ``shift``.

    Args:
        tokens: (tokens,) of the prompt.
        chunk: (tokens,) of the chunk by itself.
        shift: negative if only its end can stand in the prompt.
        after: the earliest position at which a run may begin.
        least: fewest tokens of a run.
    """
    low = max(shift, after)
    high = max(low, min(shift + chunk.size, tokens.size))
    is_same = tokens[low:high] == chunk[low - shift : high - shift]
    if np.count_nonzero(is_same) < least:
        return []
    whole = Run(low, high, low - shift)
    return [whole.part(start, end) for start, end in spans_of(is_same, least)]


def spans_of(mask: NDArray[np.bool_], least: int = 1) -> list[tuple[int, int]]:
    """Return the runs [start, end) of true values in a mask that have at least ``least`` values."""
    bounded = np.zeros(mask.size + 2, np.bool_)
    bounded[1:-1] = mask
    edges = np.flatnonzero(bounded[1:] != bounded[:-1]).tolist()
    return [
        span for span in zip(edges[::2], edges[1::2], strict=True) if span[1] - span[0] >= least
    ]


def find_run(tokens: Ids, chunk: Ids, near: int, after: int) -> Run | None:
    """Return the longest run of a chunk's tokens in a prompt; None if hardly any are the same.

    A run that is n tokens off the expected position must be more than n tokens longer to win.

    Args:
        tokens: (tokens,) of the prompt.
        chunk: (tokens,) of the chunk by itself.
        near: the expected position of the chunk's first token in the prompt.
        after: the earliest position at which the run may begin.
    """
    best, most = Run(0, 0), -SLACK
    for shift in sorted(range(-SLACK, SLACK + 1), key=abs):
        for run in equal_runs(tokens, chunk, near + shift, after=after):
            if run.tokens - abs(shift) > most:
                best, most = run, run.tokens - abs(shift)
        # Only in repetitive text could another run be longer.
        lacks = chunk.size - best.tokens
        if lacks == 0 or (chunk.size > LONG and lacks <= EDGES):
            break
    return best if best.tokens >= max(1, min(chunk.size / 2, chunk.size - EDGES)) else None
