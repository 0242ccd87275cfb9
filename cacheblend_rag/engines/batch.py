"""Batches: prompts that share chunk KV run next to each other, a few at a time.

Chunk KV that one of them loaded is then still in memory for the others, even if all prompts
together have more chunks than fit there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar, cast

from cacheblend_rag.engines.answer import Delta, Generation, Request
from cacheblend_rag.engines.stream import Stream, result_of
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk

T = TypeVar("T")

MOST_TOGETHER = 8
"""Most prompts that are at work at the same time."""
MOST_OVERTAKEN = 32
"""Most later prompts that may begin before a prompt."""
MOST_COMPARED = 64
"""The next prompt is one of so many that have waited longest."""

Chunks = Mapping[KVKey, int]
"""The chunks of one prompt, each with its number of tokens."""


def chunks_of(placed: Iterable[PlacedChunk]) -> dict[KVKey, int]:
    """Return the chunks of a prompt with their tokens."""
    return {one.key: one.end - one.start for one in placed}


@dataclass(eq=False)
class _Waiting(Generic[T]):
    """A prompt in the queue. overtaken: how many later ones have begun before it."""

    item: T
    chunks: Chunks
    overtaken: int = 0


class OverlapQueue(Generic[T]):
    """Waiting prompts; the next is the one that shares most chunk KV with those that began last.

    A chunk counts by its tokens, divided by the number of waiting prompts that have it: chunks that
    nearly all have are in memory in any order. Of equal prompts the oldest comes first, and none is
    overtaken by more than ``MOST_OVERTAKEN`` later ones.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting[T]] = []
        self._count = Counter[KVKey]()
        self._last = deque[Chunks](maxlen=MOST_TOGETHER)

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
        self._take([one.item for one in self._waiting].index(item))

    def pop(self) -> T:
        """Remove the prompt that begins next, and return it; raises IndexError if none waits."""
        place = self._next()
        for older in self._waiting[:place]:
            older.overtaken += 1
        begun = self._take(place)
        self._last.append(begun.chunks)
        return begun.item

    def _next(self) -> int:
        # The oldest one has been overtaken at least as often as any other.
        if self._waiting[0].overtaken >= MOST_OVERTAKEN:
            return 0
        loaded = set[KVKey]().union(*self._last)
        oldest = [*islice(self._waiting, MOST_COMPARED)]
        shared = [self._shared(one.chunks, loaded) for one in oldest]
        return shared.index(max(shared))  # the first of equal ones, which is the oldest

    def _shared(self, chunks: Chunks, loaded: set[KVKey]) -> float:
        return sum(tokens / self._count[key] for key, tokens in chunks.items() if key in loaded)

    def _take(self, place: int) -> _Waiting[T]:
        taken = self._waiting.pop(place)
        self._count.subtract(taken.chunks.keys())
        self._count += Counter()  # drops what no prompt has any more
        return taken


def by_overlap(prompts: Iterable[Chunks]) -> list[int]:
    """Return the indices of prompts in the order in which an ``OverlapQueue`` begins them."""
    queue = OverlapQueue[int]()
    for index, chunks in enumerate(prompts):
        queue.add(index, chunks)
    return [queue.pop() for _ in range(len(queue))]


class _SharedChunks:
    """Announces each chunk that several prompts of a batch read, from the first one to the last.

    batch: the chunks of each prompt. announce: announces that some will be read, until its context
    ends.
    """

    def __init__(
        self,
        batch: Iterable[Chunks],
        announce: Callable[[Iterable[KVKey]], AbstractContextManager[object]],
    ) -> None:
        self._readers, self._announce = Counter(key for chunks in batch for key in chunks), announce
        self._announced: dict[KVKey, ExitStack] = {}

    def begin(self, chunks: Chunks) -> None:
        """Announce what a prompt shares with later ones; call it before the prompt is read for."""
        for key in chunks:
            if self._readers[key] > 1 and key not in self._announced:
                self._announced[key] = ExitStack()
                self._announced[key].enter_context(self._announce([key]))

    def end(self, chunks: Chunks) -> None:
        """End the announcement of what only this prompt still had to read."""
        self._readers.subtract(chunks.keys())
        for key in chunks:
            if not self._readers[key] and key in self._announced:
                self._announced.pop(key).close()

    def close(self) -> None:
        """End all announcements."""
        for announced in self._announced.values():
            announced.close()


def answer_batch(
    start: Callable[[Request], Stream[Delta]],
    requests: Sequence[Request],
    announce: Callable[[Iterable[KVKey]], AbstractContextManager[object]],
) -> list[Generation]:
    """Return the answers of requests, in their order.

    One that finds no memory beside the others is answered again after them. If one fails, the
    others are cancelled and its error is raised.

    Args:
        start: begins to answer a request.
        requests: at most ``MOST_TOGETHER`` of them are answered at a time.
        announce: announces that chunks will be read, until its context ends.
    """
    chunks = [chunks_of(request.prepared.placed) for request in requests]
    waiting, shared = deque(by_overlap(chunks)), _SharedChunks(chunks, announce)
    running: dict[Future[Delta], int] = {}
    last: dict[int, Delta] = {}
    try:
        while waiting or running:
            while waiting and len(running) < MOST_TOGETHER:
                index = waiting.popleft()
                shared.begin(chunks[index])
                running[start(requests[index]).future()] = index
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                index = running.pop(done)
                shared.end(chunks[index])
                with suppress(OutOfMemoryError):
                    last[index] = result_of(done)
        ends = [last.get(index) or start(one).last() for index, one in enumerate(requests)]
    finally:
        for request in requests:
            request.cancel.set()
        shared.close()
    return [cast(Generation, end.generation) for end in ends]
