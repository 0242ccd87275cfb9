"""Answers the requests of a batch: prompts are prefilled one after another, then decoded together.

A stream's first piece comes with its prefill. Until a prompt is prefilled, no other stream of the
batch is read, so an engine whose streams run while they are read decodes all of them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import chain
from threading import Event
from typing import cast

from cacheblend_rag.engines.answer import Delta, Generation, Request
from cacheblend_rag.engines.batch_order import (
    MOST_TOGETHER,
    Chunks,
    by_overlap,
    chunks_of,
)
from cacheblend_rag.engines.stream import Stream
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey

Wanting = Callable[[Iterable[KVKey]], AbstractContextManager[None]]
"""Announces that a request will read chunks, until the context ends."""


def answer_batch(
    start: Callable[[Request], Stream[Delta]],
    requests: Sequence[Request],
    wanting: Wanting,
) -> list[Generation]:
    """Return the answers of requests, in their order.

    One that finds no memory beside the others is answered again after them. If one fails, the
    others are cancelled and its error is raised.

    Args:
        start: begins to answer a request; called for all of them before any is read.
        requests: begun and read in groups that share chunks.
        wanting: announces the chunks that a request shares with others of its group, from the
            beginning of the group until its prompt is prefilled.
    """
    prompts = [chunks_of(request.prepared.placed) for request in requests]
    groups = by_overlap(prompts)
    order = [*chain(*groups)]
    with ThreadPoolExecutor(MOST_TOGETHER, thread_name_prefix="cacheblend-batch") as pool:
        reader = _Reader(pool)
        try:
            begun = {index: iter(start(requests[index])) for index in order}
            with closing(_announced(begun, groups, prompts, wanting)) as streams:
                last = dict(zip(order, reader.read(streams), strict=True))
            ends = [last[index] or start(one).last() for index, one in enumerate(requests)]
        finally:
            for request in requests:
                request.cancel.set()
            reader.release()
    return [cast(Generation, end.generation) for end in ends]


def _announced(
    streams: Mapping[int, Iterator[Delta]],
    groups: Sequence[Sequence[int]],
    prompts: Sequence[Chunks],
    wanting: Wanting,
) -> Generator[Iterator[Delta]]:
    """Yield streams in the order of their groups; the next one once the prompt is prefilled."""
    for group in groups:
        counts = Counter(chain.from_iterable(prompts[index] for index in group))
        with ExitStack() as until_all_are_read:
            announced = {}
            for index in group:
                shared = [key for key in prompts[index] if counts[key] > 1]
                announced[index] = until_all_are_read.enter_context(ExitStack())
                announced[index].enter_context(wanting(shared))
            for index in group:
                yield streams[index]
                announced[index].close()


class _Reader:
    """Reads streams to their ends: the first piece of each in turn, the rest of them together."""

    def __init__(self, pool: Executor) -> None:
        self._pool, self._may_read = pool, Event()

    def read(self, streams: Iterable[Iterator[Delta]]) -> list[Delta | None]:
        """Return the last piece of each stream, None if there was no memory for it.

        Each one is asked for once the first piece of the one before was read.
        """
        found: list[Future[Delta | None]] = []
        running: set[Future[Delta | None]] = set()
        for stream in streams:
            if len(running) == MOST_TOGETHER:
                running = self._wait_for_one(running)
            found.append(self._begun(stream))
            running.add(found[-1])
        while running:
            running = self._wait_for_one(running)
        return [one.result() for one in found]

    def release(self) -> None:
        """Let all streams be read to their ends."""
        self._may_read.set()

    def _wait_for_one(self, running: set[Future[Delta | None]]) -> set[Future[Delta | None]]:
        """Read until a stream ends, and raise its error; returns those that have not ended."""
        self._may_read.set()
        done, left = wait(running, return_when=FIRST_COMPLETED)
        self._may_read.clear()
        for one in done:
            one.result()
        return left

    def _begun(self, stream: Iterator[Delta]) -> Future[Delta | None]:
        """Read the first piece of a stream here, and the rest in a thread."""
        try:
            first = next(stream)
        except OutOfMemoryError:
            first = None
        return self._pool.submit(self._rest, first, stream)

    def _rest(self, last: Delta | None, stream: Iterator[Delta]) -> Delta | None:
        try:
            while True:
                self._may_read.wait()
                last = next(stream)
        except StopIteration:  # also after an error
            return last
        except OutOfMemoryError:
            return None
