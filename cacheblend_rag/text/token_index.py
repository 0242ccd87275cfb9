"""An index of token sequences that finds them, or parts of them, in any prompt's tokens.

A sequence is known by *anchors* (``anchors.py``): the hashes of a few of its windows, so many that
every run of ``least`` tokens holds one. A search hashes all windows of the prompt at once, and
compares tokens only around those that are anchors, up to a bound.

New anchors go to a small level; a thread merges it into the large one when it has grown, while
searches read both.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from threading import Lock, Thread
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.text.anchors import (
    OFFSET_BITS,
    ZERO,
    Anchors,
    Hits,
    Integers,
    Tokens,
    anchors_of,
    window_hashes,
)

Name = TypeVar("Name", bound=Hashable)
SomeTokens = Sequence[int] | NDArray[np.integer]

WINDOW = 8
"""Tokens that an anchor is the hash of."""
BATCH = 1024
"""Sequences whose anchors are computed together."""
MOST_PLACES = 64
"""Places that are looked at where more sequences have the same window; the first ones added."""
MOST_HITS = 1 << 15
"""Places that a search may always look at, besides one for every fourth token of the prompt."""
COMPARED_TOKENS = 1 << 18
"""Tokens that a search may always compare, besides one for each of the prompt's."""
LEAST_COMPARED = 128
"""What comparing few tokens counts at least: the time it takes is that of its calls."""
LEAST_MERGED = 1 << 14
"""Anchors that are merged into the large level at once, at least."""
MERGED_SHARE = 8
"""The small level is merged when it has one anchor for so many in the large one."""


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


@dataclass(frozen=True, slots=True)
class TokenRun(Generic[Name]):
    """Tokens [start, end) of a prompt equal those of a sequence from index ``skip`` on.

    name: the sequence's.
    """

    name: Name
    start: int
    end: int
    skip: int


class TokenIndex(Generic[Name]):
    """Token sequences by name. Safe to share between threads; one at a time may change it.

    Runs of fewer than ``least`` tokens are not found. Of a repetition of very few distinct tokens,
    of a text that more than 64 sequences have in common, and in a prompt that resembles thousands
    of places, not everything need be found; what is found is equal, always.
    """

    def __init__(self, least: int = 32) -> None:
        self.least = least
        self._window = min(WINDOW, least)
        self._stride = least - self._window + 1
        self._lock, self._merging = Lock(), Lock()
        self._merger: Thread | None = None
        self._next = 0
        self._numbers: dict[Name, int] = {}
        self._known: dict[int, tuple[Name, Tokens]] = {}
        self._gone: set[int] = set()
        self._new: list[tuple[NDArray[np.uint64], Integers]] = []
        nothing = Anchors.sort([], [])
        self._levels: tuple[Anchors, ...] = (nothing, nothing)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        """Whether there is a sequence of this name."""
        return name in self._numbers

    def tokens(self, name: Name) -> Tokens:
        """Return the tokens of a sequence, (tokens,), read-only; KeyError for an unknown name."""
        return self._known[self._numbers[name]][1]

    # Changes

    def add(self, tokens: SomeTokens, name: Name) -> None:
        """Add a sequence; nothing happens if its name is known."""
        self._add([(tokens, name)])
        self._merge_soon()

    def add_many(self, sequences: Iterable[tuple[SomeTokens, Name]]) -> None:
        """Add sequences, and merge them at once: much faster than one by one."""
        rest = iter(sequences)
        while batch := list(islice(rest, BATCH)):
            self._add(batch)
        self.merge()

    def discard(self, name: Name) -> None:
        """Forget a sequence, if its name is known: no later search finds it."""
        with self._lock:
            number = self._numbers.pop(name, None)
            if number is not None:
                del self._known[number]
                self._gone.add(number)
        self._merge_soon()

    def merge(self) -> None:
        """Merge what is new into the large level, and drop what belongs to forgotten sequences.

        A thread does it by itself when enough has changed.
        """
        with self._merging:
            with self._lock:
                self._take_new()
                levels, gone = self._levels, np.array(sorted(self._gone), np.int64)
                nothing = Anchors.sort([], [])
                self._levels = (*levels, nothing)
            merged = levels[0]
            for level in levels[1:]:
                if level.size or gone.size:
                    merged = merged.joined(level, gone)
            with self._lock:
                self._levels = (merged, *self._levels[len(levels) :])
                self._gone.difference_update(gone.tolist())

    def _add(self, sequences: Iterable[tuple[SomeTokens, Name]]) -> None:
        added: list[Tokens] = []
        with self._lock:
            first = self._next
            for tokens, name in sequences:
                if name not in self._numbers:
                    own = _as_array(tokens).copy()
                    own.flags.writeable = False
                    self._numbers[name] = self._next
                    self._known[self._next] = name, own
                    self._next += 1
                    added.append(own)
        if added:
            numbers = range(first, first + len(added))
            new = anchors_of(added, numbers, self._window, self._stride)
            with self._lock:
                self._new.append(new)

    def _take_new(self) -> None:
        """Put new anchors into the small level; the lock is held."""
        if self._new:
            parts, self._new = self._new, []
            new = Anchors.sort([one for one, _ in parts], [one for _, one in parts])
            *earlier, small = self._levels
            self._levels = (*earlier, small.joined(new, np.empty(0, np.int64)))

    def _merge_soon(self) -> None:
        """Start a thread that merges, if it is time to and none does."""
        with self._lock:
            large, *small = self._levels
            waiting = sum(level.size for level in small) + sum(h.size for h, _ in self._new)
            most = max(LEAST_MERGED, large.size // MERGED_SHARE)
            many = max(LEAST_MERGED, len(self._known)) // MERGED_SHARE
            if waiting < most and len(self._gone) < many:
                return
            if self._merger is not None and self._merger.is_alive():
                return
            merger = Thread(target=self.merge, name="cacheblend-token-index", daemon=True)
            with suppress(RuntimeError):  # no thread to be had: the next change tries again
                merger.start()
                self._merger = merger

    # Searches

    def find(
        self, token_ids: SomeTokens, start: int = 0, end: int | None = None
    ) -> list[TokenRun[Name]]:
        """Return the runs in ``token_ids[start:end]``, in order, without overlaps.

        The longest win, then the sequences that were added first; the others keep what is left of
        them, if it has ``least`` tokens.
        """
        prompt = _as_array(token_ids[start:end])
        with self._lock:
            self._take_new()
            levels = self._levels
        diagonals = self._diagonals(prompt, levels)
        runs = equal_runs(prompt, diagonals, self.least)
        found = []
        for begin, stop, source in kept_runs(runs, diagonals.numbers, self.least):
            known = self._known.get(diagonals.numbers[source])
            if known is not None:  # not forgotten meanwhile
                skip = begin - diagonals.shifts[source]
                found.append(TokenRun(known[0], start + begin, start + stop, skip))
        return found

    def _diagonals(self, prompt: Tokens, levels: Sequence[Anchors]) -> Diagonals:
        """Return the diagonals to compare: those with many hits, then those with one.

        The latter, the most by far in ordinary text, are compared around their hit before.
        """
        seen = window_hashes(prompt, self._window)
        most = MOST_HITS + prompt.size // 4
        places = MOST_PLACES + len(self._gone)  # forgotten sequences take no others' places
        parts = [level.hits(seen, most, places) for level in levels if level.size]
        if not any(part.diagonals.size for part in parts):
            return Diagonals()
        hits = Hits.joined(parts)
        keys, firsts, counts = np.unique(hits.diagonals, return_index=True, return_counts=True)
        is_single = counts == 1
        singles = firsts[is_single]
        singles = singles[np.argsort(hits.crowds[singles], kind="stable")]
        margin = self.least - self._window
        lows = np.maximum(hits.positions[singles] - margin, 0)
        highs = np.minimum(hits.positions[singles] + self._window + margin, prompt.size)
        near = self._within_budget(prompt, hits.diagonals[singles], lows, highs)
        good = [
            (near.numbers[source] << OFFSET_BITS) + ZERO + near.shifts[source]
            for source in equal_runs(prompt, near, self.least).sources.tolist()
        ]
        several = keys[~is_single]
        several = several[np.argsort(-counts[~is_single], kind="stable")]
        chosen = np.concatenate([several, np.array(good, np.int64)])
        return self._within_budget(
            prompt, chosen, np.zeros_like(chosen), np.full_like(chosen, prompt.size)
        )

    def _within_budget(
        self, prompt: Tokens, keys: Integers, lows: Integers, highs: Integers
    ) -> Diagonals:
        """Return diagonals within [low, high) of the prompt, as many as the budget allows."""
        left, found = budget(prompt.size), Diagonals()
        numbers, shifts = (keys >> OFFSET_BITS).tolist(), ((keys & (2 * ZERO - 1)) - ZERO).tolist()
        bounds = zip(numbers, shifts, lows.tolist(), highs.tolist(), strict=True)
        for number, shift, low, high in bounds:
            known = self._known.get(number)
            if known is None:
                continue
            tokens = known[1]
            start, stop = max(low, shift), min(high, shift + len(tokens))
            left -= max(stop - start, LEAST_COMPARED)
            if left < 0:
                break
            found.numbers.append(number)
            found.shifts.append(shift)
            found.starts.append(start)
            found.pieces.append(tokens[start - shift : stop - shift])
        return found


def _as_array(tokens: SomeTokens) -> Tokens:
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32, copy=False)
    return np.frombuffer(array("I", tokens), np.uint32)


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
    own = np.array(numbers, np.int64)[runs.sources]
    columns = (runs.starts - runs.ends, own, runs.starts, runs.ends, runs.sources)
    waiting = list(zip(*(column.tolist() for column in columns), strict=True))
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
