"""Searches a text for any of many known texts, by the hash of one window of each.

The *anchor* of a text is the hash of one window of up to 32 characters in it. A search
hashes every window of the searched text at once, discards almost all of them by a table of marks,
and compares texts only where an anchor matches. A new text gets an anchor that no other text has,
if possible, so texts that share long beginnings or ends are about as cheap to find as any others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Span = tuple[int, int]

SLOTS_PER_MARK = 32
COMPARED_CHARACTERS = 4 << 20
"""Characters that a search may always compare, besides some per character; see SearchBudget."""
COMPARED_PER_CHARACTER = 16
LEAST_COMPARED = 64
SMALLEST_SLOT_BITS = 12
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
        self._texts: dict[int, list[tuple[int, str]]] = {}
        self._anchor: dict[str, int] = {}
        self._make_room()

    def add(self, text: str, hashes: Hashes) -> None:
        """Register ``text``, whose window hashes are ``hashes``."""
        if self._marked * SLOTS_PER_MARK >= len(self._marks):
            self._make_room()
        offset = self._free_window(hashes)
        anchor = int(hashes[offset])
        self._texts.setdefault(anchor, []).append((offset, text))
        self._anchor[text] = anchor
        self._mark(hashes[offset : offset + 1])

    def discard(self, text: str) -> None:
        """Forget ``text``, if it is here. Its mark stays until the table grows: it costs time."""
        anchor = self._anchor.pop(text, None)
        if anchor is None:
            return
        self._texts[anchor] = [entry for entry in self._texts[anchor] if entry[1] != text]
        if not self._texts[anchor]:
            del self._texts[anchor]

    def occurrences(self, text: str, hashes: Hashes, budget: SearchBudget) -> Iterator[Span]:
        """Yield the spans of registered texts in ``text``, overlaps included."""
        marked = np.flatnonzero(self._marks[self._slots(hashes)])
        for position, anchor in zip(marked.tolist(), hashes[marked].tolist(), strict=True):
            for offset, known in self._texts.get(anchor, ()):
                start = position - offset
                if not budget.allows(known):
                    return
                if start >= 0 and text.startswith(known, start):
                    yield start, start + len(known)

    def _free_window(self, hashes: Hashes) -> int:
        """Choose an anchor: an unmarked window at or after the middle, else before it.

        From the middle, because texts split by one rule often have similar beginnings and ends.
        """
        middle = len(hashes) // 2
        free = ~self._marks[self._slots(hashes)]
        for first, part in ((middle, free[middle:]), (0, free[:middle])):
            if part.any():
                return first + int(part.argmax())
        anchors: list[int] = hashes.tolist()
        crowds = {anchor: len(self._texts.get(anchor, ())) for anchor in anchors}
        return anchors.index(min(crowds, key=crowds.__getitem__))

    def _slots(self, hashes: Hashes) -> NDArray[np.int64]:
        slots: NDArray[np.int64] = (hashes >> self._shift).view(np.int64)
        return slots

    def _mark(self, hashes: Hashes) -> None:
        self._marks[self._slots(hashes)] = True
        self._marked += len(hashes)

    def _make_room(self) -> None:
        """Rebuild the marks with room for twice the current texts, without stale marks."""
        slots = 2 * SLOTS_PER_MARK * len(self._texts)
        bits = max(SMALLEST_SLOT_BITS, slots.bit_length())
        self._shift = np.uint64(64 - bits)
        self._marks = np.zeros(1 << bits, dtype=np.bool_)
        self._marked = 0
        self._mark(np.fromiter(self._texts, dtype=np.uint64, count=len(self._texts)))


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
