"""Which objects of an object store's tokens are to be replaced by fewer, or by smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate, takewhile

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
