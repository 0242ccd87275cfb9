"""Streams of an answer's pieces, which an engine's own thread makes and any other one reads.

A stream can be read by a thread, or in an event loop, which is never blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Event
from typing import Any, Generic, TypeAlias, TypeVar

from cacheblend_rag.engines.lifetime import CLOSED
from cacheblend_rag.errors import ConfigError

T = TypeVar("T")

Take: TypeAlias = Callable[[T], None]
"""Is called with each item, in the thread that makes it."""
Begin: TypeAlias = Callable[[Take[T]], Future[T]]
"""Begins to make items; returns a future of the last of them, which is done after all were taken.
"""
END: Any = object()


class Cancellation:
    """Whether work must stop: the caller has set its event, or this object was set.

    is_over: returns whether the work has no receiver any more, such as after closing an engine.
    """

    def __init__(
        self, asked: Event | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self._asked, self._own, self._is_over = asked, Event(), is_over

    def set(self) -> None:
        """Stop the work."""
        self._own.set()

    def is_set(self) -> bool:
        """Whether the work is to stop."""
        asked = self._asked is not None and self._asked.is_set()
        return asked or self._own.is_set() or self._is_over()


class Stream(Generic[T]):
    """Items, made from the first read on. Read it once, in one way; abandoning it stops the work.

    begin: begins to make them. cancel: set it to stop the work; items made until then are still
    delivered. check_may_wait: raises an error in a thread that may not wait for items.
    """

    def __init__(
        self,
        begin: Begin[T],
        cancel: Cancellation,
        check_may_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._begin, self.cancel, self._check_may_wait = begin, cancel, check_may_wait

    def future(self) -> Future[T]:
        """Begin the work; returns a future of the last item (``result_of`` reads it)."""
        self._check_may_wait()
        return self._begin(lambda _: None)

    def last(self) -> T:
        """Return the last item, once it is there."""
        try:
            return result_of(self.future())
        except BaseException:
            self.cancel.set()
            raise

    def __iter__(self) -> Iterator[T]:
        self._check_may_wait()
        arrived: SimpleQueue[T] = SimpleQueue()
        done = self._begin(arrived.put)
        try:
            done.add_done_callback(lambda _: arrived.put(END))
            while (item := arrived.get()) is not END:
                yield item
            result_of(done)
        finally:
            self.cancel.set()
            del done

    async def __aiter__(self) -> AsyncIterator[T]:
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[T] = asyncio.Queue()

        def take(item: T) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                here.call_soon_threadsafe(arrived.put_nowait, item)

        done = self._begin(take)
        try:
            done.add_done_callback(lambda _: take(END))
            while (item := await arrived.get()) is not END:
                yield item
            result_of(done)
        finally:
            self.cancel.set()
            del done


def result_of(done: Future[T]) -> T:
    """Wait for a future; raises its error, and ConfigError if its engine was closed meanwhile."""
    try:
        return done.result()
    except CancelledError as error:
        raise ConfigError(CLOSED) from error
    finally:
        del done  # whose error refers to this frame: a circle
