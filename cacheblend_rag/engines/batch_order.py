"""Orders prompts by the chunk KV that they share, with a bound on how long each may wait.

Prompts that share chunks run next to each other, so that chunk KV which one of them loaded is still
in memory for the others, even if all prompts together have more chunks than fit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk

T = TypeVar("T")

MOST_TOGETHER = 8
"""Most prompts of a group: of those that are at work at the same time."""
MOST_WAIT = 4
"""Most groups of later prompts that may begin before a prompt."""
GROUPS_AHEAD = 8
"""How many groups' worth of the oldest waiting prompts the next one is chosen from."""

Chunks = Mapping[KVKey, int]
"""The chunks of one prompt, each with its number of tokens."""


def chunks_of(placed: Iterable[PlacedChunk]) -> dict[KVKey, int]:
    """Return the chunks of a prompt with their tokens."""
    return {one.key: one.end - one.start for one in placed}


def by_overlap(
    prompts: Sequence[Chunks], *, most: int = MOST_TOGETHER, most_wait: int = MOST_WAIT
) -> list[int]:
    """Return the indices of prompts in the order in which an ``OverlapQueue`` begins them."""
    queue = OverlapQueue[int](most, most_wait)
    for index, chunks in enumerate(prompts):
        queue.add(index, chunks)
    return [queue.pop() for _ in prompts]


@dataclass(eq=False)
class _Waiting(Generic[T]):
    """A prompt in the queue. overtaken: how many later ones have begun before it."""

    item: T
    chunks: Chunks
    overtaken: int = 0


class OverlapQueue(Generic[T]):
    """Waiting prompts; the next is the one that shares most chunk KV with those that began last.

    A chunk counts by its tokens, divided by the number of waiting prompts that have it: chunks that
    nearly all have are in memory in any order. Prompts begin in groups of ``most``; chunks of the
    group before count half. Of equal prompts the oldest comes first, and none is overtaken by more
    than ``most_wait`` groups of later ones.
    """

    def __init__(self, most: int = MOST_TOGETHER, most_wait: int = MOST_WAIT) -> None:
        self._most, self._most_overtaken = most, most * most_wait
        self._waiting: list[_Waiting[T]] = []
        self._count = Counter[KVKey]()
        self._now, self._before = set[KVKey](), set[KVKey]()
        self._begun = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (one.item for one in self._waiting)

    def add(self, item: T, chunks: Chunks) -> None:
        """Add a prompt."""
        self._waiting.append(_Waiting(item, chunks))
        self._count.update(chunks.keys())

    def remove(self, item: T) -> None:
        """Remove a prompt that waits no longer; raises ValueError if it is not in the queue."""
        places = [place for place, one in enumerate(self._waiting) if one.item is item]
        if not places:
            raise ValueError("the prompt does not wait")
        self._take(places[0])

    def pop(self) -> T:
        """Remove the prompt that begins next, and return it; raises IndexError if none waits."""
        if self._begun % self._most == 0:
            self._now, self._before = set(), self._now
        place = self._next()
        for older in self._waiting[:place]:
            older.overtaken += 1
        begun = self._take(place)
        self._begun += 1
        self._now.update(begun.chunks)
        return begun.item

    def _next(self) -> int:
        # The oldest one has been overtaken at least as often as any other.
        if self._waiting[0].overtaken >= self._most_overtaken:
            return 0
        oldest = [*islice(self._waiting, self._most * GROUPS_AHEAD)]
        shared = [self._shared(one.chunks) for one in oldest]
        return shared.index(max(shared))  # the first of equal ones, which is the oldest

    def _take(self, place: int) -> _Waiting[T]:
        taken = self._waiting.pop(place)
        self._count.subtract(taken.chunks.keys())
        self._count += Counter()  # drops what no prompt has any more
        return taken

    def _shared(self, chunks: Chunks) -> float:
        """Return how much of a waiting prompt the group, or the one before, has."""
        shared = 0.0
        for key, tokens in chunks.items():
            if key in self._now:
                shared += tokens / self._count[key]
            elif key in self._before:
                shared += tokens / self._count[key] / 2
        return shared
