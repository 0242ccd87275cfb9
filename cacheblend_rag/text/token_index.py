"""An index of token sequences that finds them, or parts of them, in any prompt's tokens.

A sequence is known by *anchors* (``anchors.py``): the hashes of a few of its windows, so many that
every run of ``least`` tokens holds one. A search hashes all windows of the prompt at once, and
compares tokens only around those that are anchors, up to a bound (``token_runs.py``).

New anchors go to a small level; a thread merges it into the large one when it has grown, while
searches read both.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from cacheblend_rag.text.token_runs import Budget, Diagonal, equal_runs, without_overlaps

Name = TypeVar("Name", bound=Hashable)
SomeTokens = Sequence[int] | NDArray[np.integer]

WINDOW = 8
"""Tokens that an anchor is the hash of."""
BATCH = 1024
"""Sequences whose anchors are computed together."""
MOST_HITS = 1 << 15
"""Places that a search may always look at, besides one for every other token of the prompt."""
LEAST_MERGED = 1 << 14
"""Anchors that are merged into the large level at once, at least."""
MERGED_SHARE = 8
"""The small level is merged when it has one anchor for so many in the large one."""


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

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays: tokens and anchors."""
        with self._lock:
            tokens = sum(tokens.nbytes for _, tokens in self._known.values())
            new = sum(hashes.nbytes + places.nbytes for hashes, places in self._new)
            return tokens + new + sum(level.nbytes for level in self._levels)

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
            new = Anchors.sort([one for one, _ in self._new], [one for _, one in self._new])
            *earlier, small = self._levels
            self._levels = (*earlier, small.joined(new, np.empty(0, np.int64)))
            self._new = []

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
        numbers = np.array([one.number for one in diagonals], np.int64)
        found = []
        for begin, stop, source in without_overlaps(runs, numbers, self.least):
            one = diagonals[source]
            known = self._known.get(one.number)
            if known is not None:
                skip = one.skip + begin - one.start
                found.append(TokenRun(known[0], start + begin, start + stop, skip))
        return found

    def _diagonals(self, prompt: Tokens, levels: Sequence[Anchors]) -> list[Diagonal]:
        """Return the diagonals to compare, the most promising first, within the budget.

        Those with one hit only, the most by far in ordinary text, are compared around it first.
        """
        seen = window_hashes(prompt, self._window)
        most = MOST_HITS + prompt.size // 2
        hits = [level.hits(seen, most) for level in levels if level.size]
        if not any(one.diagonals.size for one in hits):
            return []
        joined = Hits.joined(hits)
        keys, firsts, counts = np.unique(joined.diagonals, return_index=True, return_counts=True)
        is_single = counts == 1
        singles = firsts[is_single]
        singles = singles[np.argsort(joined.crowds[singles], kind="stable")]
        around = self._within_budget(
            prompt, joined.diagonals[singles], joined.positions[singles], self.least - self._window
        )
        near = list(around)
        good = np.unique(equal_runs(prompt, near, self.least).sources).tolist()
        single_keys = [
            (near[index].number << OFFSET_BITS) + ZERO + near[index].start - near[index].skip
            for index in good
        ]
        several = keys[~is_single]
        several = several[np.argsort(-counts[~is_single], kind="stable")]
        chosen = np.concatenate([several, np.array(single_keys, np.int64)])
        return list(self._within_budget(prompt, chosen))

    def _within_budget(
        self,
        prompt: Tokens,
        keys: Integers,
        positions: Integers | None = None,
        margin: int = 0,
    ) -> Iterator[Diagonal]:
        """Yield diagonals, whole or within a margin of the windows at positions."""
        budget = Budget(prompt.size)
        for index, key in enumerate(keys.tolist()):
            number = key >> OFFSET_BITS
            known = self._known.get(number)
            if known is None:
                continue
            shift, tokens = (key & (2 * ZERO - 1)) - ZERO, known[1]
            start, stop = max(shift, 0), min(shift + tokens.size, prompt.size)
            if positions is not None:
                at = int(positions[index])
                start, stop = max(start, at - margin), min(stop, at + self._window + margin)
            if not budget.allows(stop - start):
                return
            yield Diagonal(number, start, start - shift, tokens[start - shift : stop - shift])


def _as_array(tokens: SomeTokens) -> Tokens:
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32, copy=False)
    return np.frombuffer(array("I", tokens), np.uint32)
