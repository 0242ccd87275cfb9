"""Groups requests by the chunk KV that they share, with a bound on how long each may wait.

Requests of a group run next to each other, so that chunk KV which one of them loaded is still in
memory for the others, even if all requests together have more chunks than fit there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk

MOST_TOGETHER = 8
"""Most requests of a group."""
MOST_WAIT = 4
"""Most groups by which a request is served later than in the order of arrival."""
GROUPS_AHEAD = 8
"""How many groups' worth of the oldest waiting requests a group is chosen from."""

Chunks = Mapping[KVKey, int]
"""The chunks of one prompt, each with its number of tokens."""


def chunks_of(placed: Iterable[PlacedChunk]) -> dict[KVKey, int]:
    """Return the chunks of a prompt with their tokens."""
    return {one.key: one.end - one.start for one in placed}


def by_overlap(
    prompts: Sequence[Chunks], *, most: int = MOST_TOGETHER, most_wait: int = MOST_WAIT
) -> list[list[int]]:
    """Return groups of ``most`` prompts (the last may be smaller) that share chunk KV, by index.

    One prompt at a time is added: of the oldest that wait, the one that shares most with the
    prompts of its group and of the group before (``Overlap``), the oldest of several. A prompt that
    is due comes first: it is served at most ``most_wait`` groups later than in the order of
    arrival. No more than ``most`` are due at a time, since those of a group arrived together.
    """
    overlap, waiting = Overlap(), dict.fromkeys(range(len(prompts)))
    groups: list[list[int]] = []
    for chunks in prompts:
        overlap.wait(chunks)

    def add(index: int) -> None:
        del waiting[index]
        groups[-1].append(index)
        overlap.begin(prompts[index])

    while waiting:
        due = [one for one in islice(waiting, most) if one // most + most_wait <= len(groups)]
        groups.append([])
        overlap.begin_group()
        for index in due:
            add(index)
        while waiting and len(groups[-1]) < most:
            oldest = islice(waiting, most * GROUPS_AHEAD)
            # The first of equal ones, which is the oldest.
            add(max(oldest, key=lambda index: overlap.of(prompts[index])))
    return groups


class Overlap:
    """How much chunk KV a waiting prompt shares with those of the current group.

    A chunk counts by its tokens, divided by the number of waiting prompts that have it: chunks that
    nearly all have are in memory in any order. Chunks of the group before count half.
    """

    def __init__(self) -> None:
        self._waiting = Counter[KVKey]()
        self._now, self._before = set[KVKey](), set[KVKey]()

    def wait(self, chunks: Chunks) -> None:
        """Add a prompt that waits."""
        self._waiting.update(chunks.keys())

    def leave(self, chunks: Chunks) -> None:
        """Remove a prompt that waits no longer."""
        for key in chunks:
            self._waiting[key] -= 1
            if self._waiting[key] <= 0:
                del self._waiting[key]

    def begin_group(self) -> None:
        """Begin a group, without prompts yet."""
        self._now, self._before = set(), self._now

    def begin(self, chunks: Chunks) -> None:
        """Move a waiting prompt to the current group."""
        self.leave(chunks)
        self._now.update(chunks)

    def of(self, chunks: Chunks) -> float:
        """Return how much a waiting prompt shares with the group."""
        shared = 0.0
        for key, tokens in chunks.items():
            if key in self._now:
                shared += tokens / self._waiting[key]
            elif key in self._before:
                shared += tokens / self._waiting[key] / 2
        return shared
