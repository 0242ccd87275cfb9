"""Anchors of token sequences: hashes of some of their windows, sorted, with the places they are at.

A *place* is one integer: the sequence's number and the window's offset in it. A place plus the
position of an equal window in a prompt is a *diagonal*: it says which sequence, and where in the
prompt that sequence would begin. Windows that belong to one run have the same diagonal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
Hashes = NDArray[np.uint64]
Integers = NDArray[np.int64]

OFFSET_BITS = 27
ZERO = 1 << (OFFSET_BITS - 1)
"""The low bits of the diagonal of a sequence that begins with the prompt."""
FEWEST_BITS = 8
MARK_BITS = 5
"""Marks have so many bits more than there are hashes: few others have a mark by chance."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
LAST_FACTOR = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)


def window_hashes(tokens: Tokens, window: int) -> Hashes:
    """Return the hash of the ``window`` tokens from each position on."""
    count = max(tokens.size - window + 1, 0)
    wide = tokens.astype(np.uint64)
    return _hashed((wide[place : place + count] for place in range(window)), count)


def anchors_of(
    sequences: Sequence[Tokens], numbers: Sequence[int], window: int, stride: int
) -> tuple[Hashes, Integers]:
    """Return hashes and places of every ``stride``-th window of sequences.

    Windows of few distinct tokens are left out: long repetitions would be found everywhere.
    """
    sizes = np.array([one.size for one in sequences], np.int64)
    counts = np.maximum((sizes - window) // stride + 1, 0)
    begins = np.repeat(np.cumsum(sizes) - sizes, counts)
    offsets = stride * ramps(counts)
    windows = np.concatenate(sequences)[(begins + offsets)[:, None] + np.arange(window)]
    distinct = 1 + np.count_nonzero(np.diff(np.sort(windows, axis=1), axis=1), axis=1)
    is_rich = distinct >= window // 2
    hashes = _hashed(windows.T, len(windows))
    bases = np.repeat((np.array(numbers, np.int64) << OFFSET_BITS) + ZERO, counts)
    return hashes[is_rich], (bases - offsets)[is_rich]


def ramps(counts: Integers) -> Integers:
    """Return 0, 1, ... up to each count, one after another."""
    ramp: Integers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return ramp


def _hashed(columns: Iterable[NDArray[np.integer]], count: int) -> Hashes:
    total = np.zeros(count, np.uint64)
    for column in columns:
        total *= FACTOR
        total += column
    total ^= total >> HALF
    total *= LAST_FACTOR
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Windows of a prompt that are anchors: diagonals, positions and crowds, all (hits,).

    crowds: how many places the anchor of a hit has, as far as they are looked at.
    """

    diagonals: Integers
    positions: Integers
    crowds: Integers

    @classmethod
    def joined(cls, parts: Sequence[Hits]) -> Hits:
        """Return the hits of several parts."""
        return cls(
            np.concatenate([one.diagonals for one in parts]),
            np.concatenate([one.positions for one in parts]),
            np.concatenate([one.crowds for one in parts]),
        )


class Anchors:
    """Anchors by their hash, never changed once made.

    hashes: (distinct,), sorted. starts: (distinct + 1,) into ``places``, in which the places of one
    hash stand in the order in which their sequences were added. A table of bits, one for every
    value of a hash's first bits, tells most hashes that are no anchors without a search.
    """

    __slots__ = ("_marks", "_marks_shift", "hashes", "places", "starts")

    def __init__(self, hashes: Hashes, places: Integers) -> None:
        """Take sorted hashes, and the place of each."""
        is_first = np.ones(hashes.size, np.bool_)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        self.hashes, self.places = hashes[firsts], places
        self.starts = np.append(firsts, hashes.size).astype(np.uint32)
        bits = max(FEWEST_BITS, firsts.size.bit_length() - 1)
        self._marks_shift = np.uint64(64 - bits - MARK_BITS)
        self._marks = self._marked(bits + MARK_BITS)

    @classmethod
    def sort(cls, hashes: Sequence[Hashes], places: Sequence[Integers]) -> Anchors:
        """Make anchors of parts, whose sequences were added in this order."""
        joined = np.concatenate([np.empty(0, np.uint64), *hashes])
        order = np.argsort(joined, kind="stable")
        return cls(joined[order], np.concatenate([np.empty(0, np.int64), *places])[order])

    @property
    def size(self) -> int:
        """Number of anchors."""
        return self.places.size

    def joined(self, later: Anchors, gone: Integers) -> Anchors:
        """Return these and later ones, without those of sequences that are gone (numbers)."""
        if not self.size and not gone.size:
            return later
        known, known_places = self._without(gone)
        new, new_places = later._without(gone)
        at = np.searchsorted(known, new, "right") + np.arange(new.size)
        is_known = np.ones(known.size + new.size, np.bool_)
        is_known[at] = False
        hashes = np.empty(is_known.size, np.uint64)
        hashes[at], hashes[is_known] = new, known
        places = np.empty(is_known.size, np.int64)
        places[at], places[is_known] = new_places, known_places
        return Anchors(hashes, places)

    def hits(self, seen: Hashes, most: int, most_places: int) -> Hits:
        """Return where the windows of a prompt are anchors.

        seen: their hashes. most: hits; anchors that many sequences have are left out first.
        most_places: of one anchor; the first ones added.
        """
        slots = (seen >> self._marks_shift).view(np.int64)
        positions = np.flatnonzero(self._marks[slots >> 3] & (1 << (slots & 7)))
        positions = positions[np.argsort(seen[positions])]  # neighbours are found much faster
        low = np.searchsorted(self.hashes, seen[positions])
        is_anchor = self.hashes[np.minimum(low, self.hashes.size - 1)] == seen[positions]
        positions, low = positions[is_anchor], low[is_anchor]
        crowds = np.minimum(self.starts[low + 1] - self.starts[low], most_places).astype(np.int64)
        if crowds.sum() > most:
            order = np.argsort(crowds, kind="stable")
            order = order[np.cumsum(crowds[order]) <= most]
            positions, low, crowds = positions[order], low[order], crowds[order]
        at = np.repeat(self.starts[low], crowds) + ramps(crowds)
        positions = np.repeat(positions, crowds)
        return Hits(self.places[at] + positions, positions, np.repeat(crowds, crowds))

    def _without(self, gone: Integers) -> tuple[Hashes, Integers]:
        hashes = np.repeat(self.hashes, np.diff(self.starts))
        if not gone.size:
            return hashes, self.places
        is_left = np.isin(self.places >> OFFSET_BITS, gone, invert=True)
        return hashes[is_left], self.places[is_left]

    def _marked(self, bits: int) -> NDArray[np.uint8]:
        """Return a table of bits, set for the slots that hashes fall into."""
        marks = np.zeros(1 << (bits - 3), np.uint8)
        slots = (self.hashes >> self._marks_shift).view(np.int64)
        if slots.size:
            bits_in_cell = (1 << (slots & 7)).astype(np.uint8)
            slots >>= 3
            firsts = np.flatnonzero(np.diff(slots, prepend=-1))
            marks[slots[firsts]] = np.bitwise_or.reduceat(bits_in_cell, firsts)
        return marks
