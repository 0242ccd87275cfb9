"""Which rows of an object store's tokens are there, from segments that are read in any order.

A chunk that is added gets a row that no other has, and what is removed are rows. So it makes no
difference in which order changes are read, how often, and from which of two copies. A name has
several rows where replicas stored it at the same time; one of them is told. ``to_merge`` says which
objects are to be replaced by fewer, or by smaller ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate, takewhile

from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, Row, StoredTokens, TokenRoom
from cacheblend_rag.engines.vllm.connector.token_segment import AddedRow, Segment

KEPT_REMOVALS = 100_000
"""Removals that are remembered, for rows that are read later, and for other replicas."""


class TokenRows:
    """The rows that were read and are not removed.

    removed: rows that were, the last ones last.
    """

    def __init__(self) -> None:
        self.removed: dict[str, None] = {}
        self._names: dict[str, Name] = {}
        self._rows: dict[Name, tuple[str, ...]] = {}
        self._told: dict[Name, str] = {}
        self._room = TokenRoom()

    def has_any(self, rows: Iterable[str]) -> bool:
        """Return whether any of some rows was read before and is not removed."""
        return any(row in self._names for row in rows)

    def of(self, name: Name) -> tuple[str, ...]:
        """Return the rows of a name."""
        return self._rows.get(name, ())

    def take(self, segment: Segment) -> dict[Row, StoredTokens | None]:
        """Take a segment; returns what changes by it, as ``TokenLog.news`` yields it."""
        told: dict[Row, StoredTokens | None] = {}
        for one in segment.added:
            self._add(one, told)
        for row in segment.removed:
            self._remove(row, told)
        while len(self.removed) > KEPT_REMOVALS:
            del self.removed[next(iter(self.removed))]
        return told

    def left(self, added: Iterable[AddedRow]) -> list[AddedRow]:
        """Return one of each name of those that are not removed, in their order.

        It is the one with the least row: whoever chooses, and from whichever rows, never do all of
        a name's rows go.
        """
        chosen: dict[Name, AddedRow] = {}
        for one in added:
            before = chosen.get(one.stored.name)
            if one.row not in self.removed and (before is None or one.row < before.row):
                chosen[one.stored.name] = one
        return list(chosen.values())

    def _add(self, one: AddedRow, told: dict[Row, StoredTokens | None]) -> None:
        row, stored, is_new = one
        name = stored.name
        if row in self.removed or row in self._names:
            return
        others = self._rows.get(name, ())
        is_told = not others or is_new
        if is_told:
            if not self._room.takes(row, stored):
                return
            if (before := self._told.get(name)) is not None:
                self._room.free(before)
            self._told[name] = row
            told[row] = stored
        self._names[row] = name
        self._rows[name] = (*others, row)

    def _remove(self, row: str, told: dict[Row, StoredTokens | None]) -> None:
        if row in self.removed:
            return
        self.removed[row] = None
        name = self._names.pop(row, None)
        if name is None:
            return
        left = tuple(one for one in self._rows[name] if one != row)
        if left:
            self._rows[name] = left
            return
        del self._rows[name]
        before = self._told.pop(name)
        self._room.free(before)
        told[before] = None


MERGE_AT = 64
"""Small objects that are merged."""
SMALL_BYTES = 1 << 20
MERGED_BYTES = 1 << 24
"""Of the objects that are merged at once, at most, unless a single one is larger."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of an object: its size in bytes, and the rows it adds and removes.

    is_held: whether there was room to remember the rows.
    """

    size: int
    rows: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    is_held: bool = True


def to_merge(
    objects: Mapping[str, Kept], removed: AbstractSet[str], copies: AbstractSet[str] = frozenset()
) -> list[str]:
    """Return the names of objects that are to be replaced together, the oldest first.

    These are: objects with chunks that were removed, since their tokens must not stay; objects that
    are in part copies of another, as when whoever replaced them was ended before it was done;
    objects of which nothing is left; and small ones, if they are many.

    Args:
        objects: by name.
        removed: all rows that are known to be removed.
        copies: objects that had rows of another one when they were read.
    """
    objects = {name: kept for name, kept in objects.items() if kept.is_held}
    copied = _copied([kept for name, kept in objects.items() if name in copies])
    small = [name for name, kept in objects.items() if kept.size < SMALL_BYTES]
    chosen = {
        name
        for name, kept in objects.items()
        if not removed.isdisjoint(kept.rows)
        or not copied.isdisjoint(kept.rows)
        or (not kept.rows and removed.isdisjoint(kept.removed))
    }
    if len(small) >= MERGE_AT:
        chosen.update(small)
    names = sorted(chosen)
    sizes = accumulate(objects[name].size for name in names)
    fitting = [*takewhile(lambda told: told[1] <= MERGED_BYTES, zip(names, sizes, strict=True))]
    return [name for name, _ in fitting] or names[:1]


def _copied(objects: Iterable[Kept]) -> AbstractSet[str]:
    """Return the rows that several objects have."""
    seen: set[str] = set()
    copied: set[str] = set()
    for kept in objects:
        copied |= seen & kept.rows
        seen |= kept.rows
    return copied
