"""Answers the requests of a batch: prompts are prefilled one after another, then decoded together.

A stream's first piece comes with its prefill. Until a prompt is prefilled, no other stream of the
batch is read, so an engine whose streams run while they are read decodes all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import cast

from cacheblend_rag.engines.answer import Delta, Generation, Request
from cacheblend_rag.engines.batch_order import grouped
from cacheblend_rag.engines.stream import Stream
from cacheblend_rag.errors import OutOfMemoryError

MOST_TOGETHER = 8
"""Most requests of a batch that are read at a time."""


def answer_batch(
    start: Callable[[Request], Stream[Delta]], requests: Sequence[Request]
) -> list[Generation]:
    """Return the answers of requests, in their order.

    One that finds no memory beside the others is answered again after them. If one fails, the
    others are cancelled and its error is raised.

    Args:
        start: begins to answer a request; called for all of them before any is read.
        requests: read in an order that keeps shared chunks together (``grouped``).
    """
    order = grouped([[one.key for one in request.prepared.placed] for request in requests])
    with ThreadPoolExecutor(MOST_TOGETHER, thread_name_prefix="cacheblend-batch") as pool:
        reader = _Reader(pool)
        try:
            begun = [iter(start(requests[index])) for index in order]
            last = dict(zip(order, reader.read(begun), strict=True))
            ends = [last[index] or start(one).last() for index, one in enumerate(requests)]
        finally:
            for request in requests:
                request.cancel.set()
            reader.release()
    return [cast(Generation, end.generation) for end in ends]


class _Reader:
    """Reads streams to their ends: the first piece of each in turn, the rest of them together."""

    def __init__(self, pool: Executor) -> None:
        self._pool, self._may_read = pool, Event()

    def read(self, streams: Sequence[Iterator[Delta]]) -> list[Delta | None]:
        """Return the last piece of each stream, None if there was no memory for it."""
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
