"""Streams: one thread makes items, another one or an event loop reads them, or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest

from cacheblend_rag.engines.stream import Cancellation, Stream, Take

PATIENCE = 30.0


def stream_of(make: Callable[[Take[int], Cancellation], int]) -> tuple[Stream[int], list[int]]:
    """A stream whose items a thread makes, and the items that were made."""
    made: list[int] = []
    cancel = Cancellation()

    def begin(take: Take[int]) -> Future[int]:
        def noted(item: int) -> None:
            made.append(item)
            take(item)

        pool = ThreadPoolExecutor(1)
        done = pool.submit(make, noted, cancel)
        pool.shutdown(wait=False)
        return done

    return Stream(begin, cancel), made


def three(take: Take[int], cancel: Cancellation) -> int:
    for item in range(3):
        take(item)
    return item


def endless(take: Take[int], cancel: Cancellation) -> int:
    item = 0
    while not cancel.is_set():
        take(item := item + 1)
    return item


def failing(take: Take[int], cancel: Cancellation) -> int:
    take(1)
    raise OSError("gone")


async def read(stream: Stream[int], most: int = 9) -> list[int]:
    found: list[int] = []
    async for item in stream:
        found.append(item)
        if len(found) == most:
            break
    return found


def test_each_way_of_reading_gets_all_items() -> None:
    assert list(stream_of(three)[0]) == [0, 1, 2]
    assert asyncio.run(read(stream_of(three)[0])) == [0, 1, 2]
    assert stream_of(three)[0].last() == stream_of(three)[0].future().result(PATIENCE) == 2


def test_an_error_comes_after_what_was_made() -> None:
    stream, _ = stream_of(failing)
    items = iter(stream)
    assert next(items) == 1
    with pytest.raises(OSError, match="gone"):
        next(items)
    for again in (lambda: asyncio.run(read(stream_of(failing)[0])), stream_of(failing)[0].last):
        with pytest.raises(OSError, match="gone"):
            again()


def test_nothing_is_made_before_the_first_read_nor_after_the_last() -> None:
    stream, made = stream_of(endless)
    items = iter(stream)
    assert not made
    assert next(items) == 1
    items.close()  # type: ignore[attr-defined]
    assert stream.cancel.is_set()
    for how in ("break", "cancelled"):
        stream, made = stream_of(endless)
        asyncio.run(left(stream, how))
        assert stream.cancel.is_set()


async def left(stream: Stream[int], how: str) -> None:
    if how == "break":
        assert await read(stream, most=2) == [1, 2]
        return
    has_begun = asyncio.Event()

    async def all_items() -> None:
        async for _ in stream:
            has_begun.set()

    task = asyncio.create_task(all_items())
    await asyncio.wait_for(has_begun.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_event_loop_that_ended_gets_nothing_any_more() -> None:
    go_on, took = Event(), Event()

    def late(take: Take[int], cancel: Cancellation) -> int:
        take(1)
        go_on.wait(PATIENCE)
        take(2)
        took.set()
        return 2

    stream, _ = stream_of(late)
    assert asyncio.run(read(stream, most=1)) == [1]
    go_on.set()
    assert took.wait(PATIENCE), "nothing is raised in the thread that makes them"


def test_a_thread_that_may_not_wait_is_told() -> None:
    def refuse() -> None:
        raise RuntimeError("not here")

    stream = Stream[int](lambda take: Future(), Cancellation(), refuse)
    for ask in (stream.last, stream.future, lambda: list(stream)):
        with pytest.raises(RuntimeError, match="not here"):
            ask()
