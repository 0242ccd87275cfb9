"""Finds known token sequences, or parts of them, in any prompt's tokens.

The index holds *anchors*: hashes of some of each sequence's windows. A search hashes all windows of
the prompt at once; where one is an anchor, it compares the tokens on both sides, up to a bound. A
hit has a *diagonal*: one integer made of the sequence's number and the position in the prompt where
the sequence would begin. All hits of one run have the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.text.reencoded import SameText, followed
from cacheblend_rag.text.runs import Run, equal_runs, spans_of
from cacheblend_rag.text.search import windows

Name = TypeVar("Name", bound=Hashable)
SomeTokens = Sequence[int] | NDArray[np.integer]
Tokens = NDArray[np.uint32]
Hashes = NDArray[np.uint32]
Integers = NDArray[np.int64]

WINDOW = 8
"""Tokens of a window, of which an anchor is the hash."""
STRIDE = 12
"""Most tokens from one anchor to the next: lines of a re-encoded text are short."""
BATCH = 1024
"""Sequences whose anchors are computed together."""
MOST_PLACES = 16
"""Most sequences that one anchor leads to, the first ones added. If there are so many, only
positions that no run covers yet are compared."""
MOST_HITS = 1 << 15
"""Places that a search may always look at, besides one for every fourth token of the prompt."""
COMPARED_TOKENS = 1 << 18
"""Tokens that a search may always compare, besides four for each of the prompt's. Repetitive tokens
would take seconds otherwise. What is not compared is not found: that loses reuse, no answer."""
LEAST_COMPARED = 1024
"""What comparing few tokens counts at least: the time it takes is that of its calls."""
LEAVES_LEVELS = 4
"""Least ratio of the anchors of a level to those of the next; below it the two are merged, as in
an LSM tree."""
LEAST_GONE = 1024
WHOLE = 4
"""Tokens that a whole sequence gains when the longest match is chosen."""

OFFSET_BITS = 27
ZERO = 1 << (OFFSET_BITS - 1)
"""Added to position in the prompt minus position in the chunk, which may be negative."""
MOST_BITS = 28
MARK_BITS = 4
"""Log2 of the bits of ``marks`` per anchor: few other hashes have a bit set by chance."""
LAST_FACTOR = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Match(Generic[Name]):
    """A sequence found in a prompt, as runs of equal tokens; between them the text is re-encoded.

    name: the sequence's.
    """

    name: Name
    runs: tuple[Run, ...]

    @property
    def start(self) -> int:
        """Index of its first token in the prompt."""
        return self.runs[0].start

    @property
    def end(self) -> int:
        """Index behind its last token in the prompt."""
        return self.runs[-1].end

    @property
    def skip(self) -> int:
        """Index of its first token in the sequence."""
        return self.runs[0].skip

    @property
    def stop(self) -> int:
        """Index behind its last token in the sequence."""
        return self.runs[-1].skip + self.runs[-1].tokens

    @property
    def tokens(self) -> int:
        """Number of tokens in its runs."""
        return sum(run.tokens for run in self.runs)

    def moved(self, by: int) -> Match[Name]:
        """Return the match in a prompt with so many more tokens before it."""
        runs = (Run(run.start + by, run.end + by, run.skip) for run in self.runs)
        return Match(self.name, tuple(runs))

    def within(self, first: int, stop: int) -> Match[Name] | None:
        """Return the part within tokens [first, stop) of the sequence; None if it is empty."""
        bounds = (
            (run, max(first - run.skip, 0), min(stop - run.skip, run.tokens)) for run in self.runs
        )
        left = tuple(run.part(low, high) for run, low, high in bounds if low < high)
        return Match(self.name, left) if left else None


class TokenIndex(Generic[Name]):
    """Token sequences by name. Threads may search while one changes it.

    Fewer than ``least`` tokens of a sequence are not found. Of a repetition of very few distinct
    tokens, of a text that more than 16 sequences have in common, and in a prompt that resembles
    thousands of places, not everything need be found; what is found is equal, always.
    """

    def __init__(self, least: int = 32) -> None:
        self.least = least
        self._window = 1 << (min(WINDOW, least).bit_length() - 1)
        self._stride = min(STRIDE, least - self._window + 1)
        self._next = 0
        self._numbers: dict[Name, int] = {}
        self._known: dict[int, tuple[Name, Tokens]] = {}
        self._gone: set[int] = set()
        self._levels: tuple[Anchors, ...] = ()

    def tokens(self, name: Name) -> Tokens:
        """Return the tokens of a sequence, (tokens,), read-only; KeyError for an unknown name."""
        return self._known[self._numbers[name]][1]

    # Changes

    def add(self, sequences: Iterable[tuple[SomeTokens, Name]]) -> None:
        """Add sequences; known names are ignored. Many at once are faster."""
        rest = (one for one in sequences if one[1] not in self._numbers)
        parts = list[Parts]()
        while batch := [self._entered(*one) for one in islice(rest, BATCH)]:
            parts.append(_anchors_of(batch, self._window, self._stride))
        if parts:
            levels, new = [*self._levels], Anchors.of(parts)
            while levels and len(levels[-1].hashes) < LEAVES_LEVELS * len(new.hashes):
                new = Anchors.of([levels.pop(), new])
            self._levels = (*levels, new)

    def discard(self, name: Name) -> None:
        """Forget a sequence, if its name is known: no later search finds it."""
        number = self._numbers.pop(name, None)
        if number is not None:
            del self._known[number]
            self._gone.add(number)
            if len(self._gone) > LEAST_GONE + len(self._known) // 64:
                self._levels = (Anchors.of(self._levels, self._gone),)
                self._gone = set()

    def _entered(self, tokens: SomeTokens, name: Name) -> tuple[int, Tokens]:
        """Give a sequence a number, and keep its tokens."""
        number, own = self._next, as_array(tokens).copy()
        own.flags.writeable = False
        self._next += 1
        self._known[number], self._numbers[name] = (name, own), number
        return number, own

    # Searches

    def find(
        self,
        token_ids: SomeTokens,
        start: int = 0,
        end: int | None = None,
        *,
        is_same: SameText | None = None,
    ) -> list[Match[Name]]:
        """Return the sequences found in ``token_ids[start:end]``, in order of their beginning.

        Nothing overlaps. The longest win, then the sequences that were added first; the others keep
        what is left of them, if it has ``least`` tokens.

        Args:
            token_ids: the prompt.
            start: where the search begins.
            end: where it ends.
            is_same: finds re-encoded sequences, too.
        """
        prompt = as_array(token_ids[start:end])
        found = sorted(self._chosen(prompt, is_same), key=lambda one: one.start)
        return [one.moved(start) for one in found] if start else found

    def _chosen(self, prompt: Tokens, is_same: SameText | None) -> Iterator[Match[Name]]:
        """Yield matches that do not overlap, the longest first."""
        waiting = [
            (-one.tokens - WHOLE * (one.tokens == size), number, one.start, place, one)
            for place, (number, size, one) in enumerate(self._matches(prompt, is_same))
        ]
        heapify(waiting)
        is_free = np.ones(prompt.size, np.bool_)
        while waiting:
            _, number, _, place, match = heappop(waiting)
            if is_free[match.start : match.end].all():
                is_free[match.start : match.end] = False
                yield match
                continue
            for part in _left(match, is_free):
                if part.tokens >= self.least:
                    heappush(waiting, (-part.tokens, number, part.start, place, part))

    def _matches(
        self, prompt: Tokens, is_same: SameText | None
    ) -> Iterator[tuple[int, int, Match[Name]]]:
        """Yield each match with the number and the size of its sequence, up to a bound."""
        left = COMPARED_TOKENS + 4 * prompt.size
        is_seen, is_found = np.zeros((2, prompt.size), np.bool_)
        followed_to: dict[int, list[Match[Name]]] = {}
        for number, shift, position, crowd in self._places(prompt):
            known = self._known.get(number)
            if known is None or (crowd >= MOST_PLACES and is_seen[position]):
                continue
            if any(one.start <= position < one.end for one in followed_to.get(number, ())):
                continue
            name, own = known
            left -= max(min(prompt.size, shift + own.size) - max(shift, 0), LEAST_COMPARED)
            if left < 0:
                return
            goes_on = is_same is not None and is_same.left > 0
            least = self._window if goes_on else self.least
            for run in equal_runs(prompt, own, shift, least=least):
                is_seen[run.start : run.end] = True
                match = Match(name, (run,))
                is_part = goes_on and run.tokens < own.size
                if is_same and is_part and not is_found[run.start : run.end].all():
                    match = Match(name, tuple(followed(prompt, own, run, is_same)))
                    if len(match.runs) > 1:
                        followed_to.setdefault(number, []).append(match)
                if match.tokens >= self.least:
                    is_found[match.start : match.end] = True
                    yield number, own.size, match

    def _places(self, prompt: Tokens) -> Iterable[tuple[int, int, int, int]]:
        """Return (number, shift, position, crowd) of possible matches, those with most hits first.

        The sequence would begin at ``shift``; its anchor is at ``position``; ``crowd`` sequences
        have the same anchor.
        """
        seen = _hashed(prompt, self._window)
        places = MOST_PLACES + len(self._gone)  # forgotten sequences take no others' places
        hits = [found for level in self._levels if (found := level.hits(seen, places))]
        if not hits:
            return ()
        found, positions, crowds = (np.concatenate(parts) for parts in zip(*hits, strict=True))
        _, firsts, counts = np.unique(found, return_index=True, return_counts=True)
        firsts = firsts[np.argsort(-counts, kind="stable")]
        numbers, shifts = found >> OFFSET_BITS, (found & (2 * ZERO - 1)) - ZERO
        columns = (numbers, shifts, positions, crowds)
        return zip(*(column[firsts].tolist() for column in columns), strict=True)


def _left(match: Match[Name], is_free: NDArray[np.bool_]) -> Iterator[Match[Name]]:
    """Yield the parts of a match that no other match has taken."""
    runs: list[Run] = []
    for run in match.runs:
        for part in (run.part(*span) for span in spans_of(is_free[run.start : run.end])):
            if runs and not is_free[runs[-1].end : part.start].all():
                yield Match(match.name, tuple(runs))
                runs = []
            runs.append(part)
    if runs:
        yield Match(match.name, tuple(runs))


def _anchors_of(sequences: Sequence[tuple[int, Tokens]], window: int, stride: int) -> Parts:
    """Return those of every ``stride``-th window of numbered sequences.

    Windows of few distinct tokens are left out: long repetitions would be found everywhere.
    """
    sizes = np.array([own.size for _, own in sequences], np.int64)
    counts = np.maximum((sizes - window) // stride + 1, 0)
    offsets = stride * _ramps(counts)
    at = np.repeat(np.cumsum(sizes) - sizes, counts) + offsets
    tokens = np.concatenate([own for _, own in sequences])
    rows = np.sort(tokens[at[:, None] + np.arange(window)], axis=1)
    is_rich = np.count_nonzero(rows[:, 1:] != rows[:, :-1], axis=1) >= window // 2 - 1
    numbers = np.array([number for number, _ in sequences], np.int64)
    places = np.repeat((numbers << OFFSET_BITS) + ZERO, counts) - offsets
    return Parts(_hashed(tokens, window)[at[is_rich]], places[is_rich])


class Parts(NamedTuple):
    """Some anchors: their hashes and places, each (anchors,).

    A place is the diagonal of the sequence if its window were at the prompt's beginning.
    """

    hashes: Hashes
    places: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Anchors:
    """Anchors, sorted by their hash, never changed once made.

    hashes, places: as in Parts, equal hashes in the order in which they were added. marks: a bit
    table (a Bloom filter with one hash), which rejects most windows without a binary search. shift:
    right shift from a hash to its bit's index.
    """

    hashes: Hashes
    places: Integers
    marks: NDArray[np.uint8]
    shift: np.uint32

    @classmethod
    def of(cls, parts: Sequence[Parts | Anchors], gone: Iterable[int] = ()) -> Anchors:
        """Sort anchors, without those of the sequences in ``gone``."""
        hashes = np.concatenate([one.hashes for one in parts])
        places = np.concatenate([one.places for one in parts])
        if gone:
            is_left = np.isin(places >> OFFSET_BITS, np.array([*gone]), invert=True)
            hashes, places = hashes[is_left], places[is_left]
        order = np.argsort(hashes, kind="stable")
        bits = min(hashes.size.bit_length() + MARK_BITS, MOST_BITS)
        shift, is_marked = np.uint32(32 - bits), np.zeros(1 << bits, np.bool_)
        is_marked[hashes >> shift] = True
        return cls(hashes[order], places[order], np.packbits(is_marked, bitorder="little"), shift)

    def hits(self, seen: Hashes, most_places: int) -> tuple[Integers, Integers, Integers] | None:
        """Return diagonals, positions and crowds, each (hits,), of windows that are anchors.

        A crowd is the number of sequences that an anchor leads to. If there are too many hits,
        those with the largest crowds are left out. None if there are none.

        Args:
            seen: (windows,) hashes of the prompt's windows.
            most_places: most sequences that one anchor leads to.
        """
        slots = seen >> self.shift
        at = np.flatnonzero(self.marks[slots >> 3] >> (slots & 7).astype(np.uint8) & 1)
        at = at[np.argsort(seen[at])]  # neighbours are found much faster
        low = np.searchsorted(self.hashes, seen[at])
        is_anchor = self.hashes[np.minimum(low, self.hashes.size - 1)] == seen[at]
        at, low = at[is_anchor], low[is_anchor]
        if not at.size:
            return None
        crowds = np.minimum(np.searchsorted(self.hashes, seen[at], "right") - low, most_places)
        if crowds.sum() > MOST_HITS + seen.size // 4:
            order = np.argsort(crowds, kind="stable")
            crowds[order[np.cumsum(crowds[order]) > MOST_HITS + seen.size // 4]] = 0
        here = np.repeat(low, crowds) + _ramps(crowds)
        positions = np.repeat(at, crowds)
        return self.places[here] + positions, positions, np.repeat(crowds, crowds)


def as_array(tokens: SomeTokens) -> Tokens:
    """Return tokens as an array, (tokens,)."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32, copy=False)
    return np.frombuffer(array("I", tokens), np.uint32)


def _hashed(tokens: Tokens, window: int) -> Hashes:
    """Return the hashes of all windows of so many tokens, a power of two, as (windows,)."""
    *_, (width, hashes) = islice(windows(tokens.astype(np.uint64)), window.bit_length())
    if width < window:
        return np.empty(0, np.uint32)
    hashes ^= hashes >> HALF
    hashes *= LAST_FACTOR
    return (hashes >> HALF).astype(np.uint32)


def _ramps(counts: Integers) -> Integers:
    """Concatenate the ranges from 0 to each count."""
    ramp: Integers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return ramp
