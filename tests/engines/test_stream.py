"""Streams: one thread makes items, another one or an event loop reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cacheblend_rag.engines.stream import Cancellation, Stream, Take

PATIENCE = 30.0


def stream_of(make: Callable[[Take[int]], int]) -> Stream[int]:
    """A stream whose items a thread makes."""

    def begin(take: Take[int]) -> Future[int]:
        pool = ThreadPoolExecutor(1)
        done = pool.submit(make, take)
        pool.shutdown(wait=False)
        return done

    return Stream(begin, Cancellation())


def three(take: Take[int]) -> int:
    for item in range(3):
        take(item)
    return item


def failing(take: Take[int]) -> int:
    take(1)
    raise OSError("gone")


async def read(stream: Stream[int]) -> list[int]:
    return [item async for item in stream]


def test_each_way_of_reading_gets_all_items() -> None:
    assert list(stream_of(three)) == [0, 1, 2]
    assert asyncio.run(read(stream_of(three))) == [0, 1, 2]
    assert stream_of(three).last() == stream_of(three).future().result(PATIENCE) == 2


def test_an_error_comes_after_what_was_made() -> None:
    stream = stream_of(failing)
    items = iter(stream)
    assert next(items) == 1
    with pytest.raises(OSError, match="gone"):
        next(items)
    assert stream.cancel.is_set()
    for again in (lambda: asyncio.run(read(stream_of(failing))), stream_of(failing).last):
        with pytest.raises(OSError, match="gone"):
            again()


def test_a_thread_that_may_not_wait_is_told() -> None:
    def refuse() -> None:
        raise RuntimeError("not here")

    stream = Stream[int](lambda take: Future(), Cancellation(), refuse)
    for ask in (stream.last, stream.future, lambda: list(stream)):
        with pytest.raises(RuntimeError, match="not here"):
            ask()
