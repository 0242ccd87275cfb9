"""Equal runs of tokens along diagonals, and which of those that overlap are kept."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from cacheblend_rag.text.anchors import Integers, Tokens

COMPARED_TOKENS = 1 << 18
"""Tokens that a search may always compare, besides one for each of the prompt's."""
LEAST_COMPARED = 128
"""What comparing few tokens counts at least: the time it takes is that of its calls."""


@dataclass(slots=True, eq=False)
class Diagonals:
    """Where tokens of sequences may stand in a prompt, most promising first; lists of one length.

    numbers: the sequences'. shifts: where in the prompt the sequence would begin; negative where
    only its end stands there. starts: where in the prompt ``pieces``, tokens of it, would begin.
    """

    numbers: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    pieces: list[Tokens] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of equal tokens, all (runs,): from which diagonal (its index), where in the prompt."""

    sources: Integers
    starts: Integers
    ends: Integers


Kept = tuple[int, int, int]
"""A run that is kept: start, end, and the index of the diagonal that it is from."""


def budget(tokens: int) -> int:
    """Return how many tokens a search of a prompt of so many may compare.

    Repetitive tokens would take seconds otherwise. What is not compared is not found: that loses
    reuse, and never changes an answer.
    """
    return COMPARED_TOKENS + tokens


def equal_runs(prompt: Tokens, diagonals: Diagonals, least: int) -> Runs:
    """Return the runs of at least ``least`` tokens in which diagonals equal the prompt."""
    nothing = np.empty(0, np.int64)
    if not diagonals.pieces:
        return Runs(nothing, nothing, nothing)
    sizes = np.array([piece.size for piece in diagonals.pieces], np.int64)
    starts = np.array(diagonals.starts, np.int64)
    ends = np.cumsum(sizes)
    shifts = starts - (ends - sizes)  # from an index in all diagonals' tokens to one in the prompt
    at = np.arange(int(ends[-1])) + np.repeat(shifts, sizes)
    is_same = np.concatenate(diagonals.pieces) == prompt[at]
    is_first, is_last = is_same.copy(), is_same.copy()
    is_first[1:] &= ~is_same[:-1]
    is_last[:-1] &= ~is_same[1:]
    is_first[ends - sizes] = is_same[ends - sizes]  # no run goes on in the next diagonal
    is_last[ends - 1] = is_same[ends - 1]
    firsts, stops = np.flatnonzero(is_first), np.flatnonzero(is_last) + 1
    is_long = stops - firsts >= least
    firsts, stops = firsts[is_long], stops[is_long]
    sources = np.searchsorted(ends, firsts, "right")
    return Runs(sources, firsts + shifts[sources], stops + shifts[sources])


def kept_runs(runs: Runs, numbers: Sequence[int], least: int) -> list[Kept]:
    """Return runs that do not overlap, in order: the longest win, then the lowest numbers.

    The others keep what is left of them, if it has ``least`` tokens. numbers: of the diagonals'
    sequences.
    """
    waiting = [
        (start - end, number, start, end, source)
        for number, start, end, source in _not_inside_others(runs, numbers)
    ]
    heapify(waiting)
    taken: list[Kept] = []
    while waiting:
        _, number, start, end, source = heappop(waiting)
        after = bisect_right(taken, (start, end, source))
        left, right = taken[max(after - 1, 0) : after], taken[after : after + 1]
        if left and left[0][1] > start:
            pieces = [(left[0][1], end)]
        elif right and right[0][0] < end:
            pieces = [(start, right[0][0]), (right[0][1], end)]
        else:
            insort(taken, (start, end, source))
            continue
        for begin, stop in pieces:
            if stop - begin >= least:
                heappush(waiting, (begin - stop, number, begin, stop, source))
    return taken


def _not_inside_others(runs: Runs, numbers: Sequence[int]) -> list[list[int]]:
    """Return number, start, end and source of the runs that lie in no other one.

    What is left of a run that lies inside another is never more than what is left of the other.
    """
    own = np.array(numbers, np.int64)[runs.sources]
    order = np.lexsort((own, -runs.ends, runs.starts))
    ends = runs.ends[order]
    is_outer = np.ones(ends.size, np.bool_)
    is_outer[1:] = ends[1:] > np.maximum.accumulate(ends)[:-1]
    order = order[is_outer]
    columns = (own, runs.starts, runs.ends, runs.sources)
    found: list[list[int]] = np.stack([column[order] for column in columns], axis=1).tolist()
    return found
