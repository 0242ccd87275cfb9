"""Searches a text for any of many known texts, by the hash of one window of each.

The *anchor* of a text is the hash of the window in its middle, of up to 32 characters: texts split
by one rule often have similar beginnings and ends. A search hashes every window of the searched
text at once, and compares texts only where an anchor matches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Span = tuple[int, int]

COMPARED_CHARACTERS = 4 << 20
"""Characters that a search may always compare, besides some per character; see SearchBudget."""
COMPARED_PER_CHARACTER = 16
LEAST_COMPARED = 64
SLOTS_PER_ANCHOR = 64
CHARACTER_FACTOR = np.uint64(0xD6E8FEB86659FD93)
WINDOW_FACTORS = [np.uint64(pow(0x9E3779B97F4A7C15, 1 << power, 1 << 64)) for power in range(5)]


class SearchBudget:
    """Limits how much a search compares. Repetitive texts would take minutes otherwise.

    A text that is not compared is not found: that loses reuse, and never changes an answer.
    """

    def __init__(self, length: int) -> None:
        self._left = COMPARED_CHARACTERS + COMPARED_PER_CHARACTER * length

    def allows(self, text: str) -> bool:
        """Whether ``text`` may still be compared; counts it."""
        self._left -= max(len(text), LEAST_COMPARED)
        return self._left >= 0


class AnchorTable:
    """Texts with anchors of one window width."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}
        self._marks: NDArray[np.bool_] | None = None  # which hashes may be anchors; see ``_marked``

    def add(self, text: str, hashes: Hashes) -> None:
        """Register ``text``, whose window hashes are ``hashes``."""
        known = self._texts.setdefault(int(hashes[_middle(len(hashes))]), [])
        if not known:
            self._marks = None
        known.append(text)

    def discard(self, text: str, hashes: Hashes) -> None:
        """Forget ``text``, whose window hashes are ``hashes``. Its mark stays for now."""
        anchor = int(hashes[_middle(len(hashes))])
        self._texts[anchor].remove(text)
        if not self._texts[anchor]:
            del self._texts[anchor]

    def occurrences(self, text: str, hashes: Hashes, budget: SearchBudget) -> Iterator[Span]:
        """Yield the spans of registered texts in ``text``, overlaps included."""
        width = len(text) - len(hashes) + 1
        for position in self._marked(hashes).tolist():
            for known in self._texts.get(int(hashes[position]), ()):
                start = position - _middle(len(known) - width + 1)
                if not budget.allows(known):
                    return
                if start >= 0 and text.startswith(known, start):
                    yield start, start + len(known)

    def _marked(self, hashes: Hashes) -> NDArray[np.int64]:
        """Return the indices of hashes that may be anchors; few others are among them."""
        if self._marks is None:
            anchors = np.fromiter(self._texts, np.uint64, len(self._texts))
            self._shift = np.uint64(64 - (SLOTS_PER_ANCHOR * len(anchors) + 1).bit_length())
            self._marks = np.zeros(1 << int(64 - self._shift), np.bool_)
            self._marks[anchors >> self._shift] = True
        return np.flatnonzero(self._marks[hashes >> self._shift])


def _middle(windows: int) -> int:
    """Return which of a text's windows is its anchor."""
    return windows // 2


def codes_of(text: str) -> Hashes:
    """Return the characters of a text as numbers, one for each."""
    # surrogatepass: a text may hold unpaired ones.
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return codes.astype(np.uint64) * CHARACTER_FACTOR


def windows(codes: Hashes) -> Iterator[tuple[int, Hashes]]:
    """Yield (width, hashes of all windows of that width) for widths 1, 2, 4, ... that fit."""
    hashes, width = codes, 1
    yield width, hashes
    for factor in WINDOW_FACTORS:
        if len(hashes) <= width:
            return
        hashes = hashes[:-width] * factor + hashes[width:]
        width *= 2
        yield width, hashes


def without_overlaps(
    spans: Iterable[Span], precedence: Callable[[Span], tuple[bool, int, int]]
) -> list[Span]:
    """Keep spans by precedence, none overlapping one kept before; return them in order."""
    kept: list[Span] = []
    for span in sorted(spans, key=precedence):
        start, end = span
        after = bisect_left(kept, span)
        clear_before = after == 0 or kept[after - 1][1] <= start
        if clear_before and (after == len(kept) or end <= kept[after][0]):
            insort(kept, span)
    return kept
