"""Answers the requests of a batch: a few at a time, those that share chunks next to each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import cast

from cacheblend_rag.engines.answer import Delta, Generation, Request
from cacheblend_rag.engines.batch_order import MOST_TOGETHER, by_overlap, chunks_of
from cacheblend_rag.engines.stream import Stream, result_of
from cacheblend_rag.errors import OutOfMemoryError


def answer_batch(
    start: Callable[[Request], Stream[Delta]], requests: Sequence[Request]
) -> list[Generation]:
    """Return the answers of requests, in their order.

    One that finds no memory beside the others is answered again after them. If one fails, the
    others are cancelled and its error is raised.

    Args:
        start: begins to answer a request.
        requests: at most ``MOST_TOGETHER`` of them are answered at a time.
    """
    waiting = deque(by_overlap([chunks_of(request.prepared.placed) for request in requests]))
    running: dict[Future[Delta], int] = {}
    last: dict[int, Delta] = {}
    try:
        while waiting or running:
            while waiting and len(running) < MOST_TOGETHER:
                index = waiting.popleft()
                running[start(requests[index]).future()] = index
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                index = running.pop(done)
                with suppress(OutOfMemoryError):
                    last[index] = result_of(done)
        ends = [last.get(index) or start(one).last() for index, one in enumerate(requests)]
    finally:
        for request in requests:
            request.cancel.set()
    return [cast(Generation, end.generation) for end in ends]
