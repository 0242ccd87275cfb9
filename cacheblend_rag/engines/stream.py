"""Streams of an answer's pieces, which connect threads and event loops.

An engine makes its answers by a generator that runs when the next piece is read, or by an
asynchronous one that runs in a background loop. Both can be read by a thread, or in an event loop,
which is never blocked.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Event
from typing import Any, Generic, TypeVar, cast

from cacheblend_rag.engines.background import CLOSED, BackgroundLoop
from cacheblend_rag.errors import ConfigError

T = TypeVar("T")

Arrival = Any
"""An item; the error that ended a stream; or END."""
END = object()


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


class Stream(ABC, Generic[T]):
    """Items being produced. Read it once, in one of both ways; abandoning it stops the work.

    cancel: set it to stop the work; items produced until then are still delivered.
    """

    def __init__(self, cancel: Cancellation) -> None:
        self.cancel = cancel

    @abstractmethod
    def __iter__(self) -> Iterator[T]: ...

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[T]: ...

    def last(self) -> T:
        """Read to the end, in this thread; returns the last item."""
        *_, item = self
        return item


class PulledStream(Stream[T]):
    """Items produced by the reading thread or, for an event loop, by a thread of ``pool``."""

    def __init__(self, items: Iterator[T], cancel: Cancellation, pool: Executor) -> None:
        super().__init__(cancel)
        self._items, self._pool = items, pool

    def __iter__(self) -> Iterator[T]:
        return self._items

    def __aiter__(self) -> AsyncIterator[T]:
        return _arriving_here(self._begin, self.cancel)

    def _begin(self, take: Callable[[Arrival], None]) -> None:
        def work() -> None:
            try:
                for item in self._items:
                    take(item)
                take(END)
            except BaseException as error:
                take(error)

        def see(done: Future[None]) -> None:
            if done.cancelled():  # the pool was shut down before a thread was free
                take(ConfigError(CLOSED))

        try:
            self._pool.submit(work).add_done_callback(see)
        except RuntimeError as error:
            raise ConfigError(CLOSED) from error


class PushedStream(Stream[T]):
    """Items produced by a background loop, from the first read on."""

    def __init__(
        self, items: AsyncIterator[T], cancel: Cancellation, background: BackgroundLoop
    ) -> None:
        super().__init__(cancel)
        self._items, self._background = items, background

    def __iter__(self) -> Iterator[T]:
        self._background.check_may_wait()
        arrived: SimpleQueue[Arrival] = SimpleQueue()
        self._background.deliver(self._items, arrived.put, END)
        items = self._arriving(arrived)
        next(items)
        return items

    def _arriving(self, arrived: SimpleQueue[Arrival]) -> Iterator[T]:
        """Yield nothing, then the items: closing it before the first one stops the work, too."""
        try:
            yield cast(T, None)
            while (item := arrived.get()) is not END:
                yield _item(item)
        finally:
            self.cancel.set()

    def __aiter__(self) -> AsyncIterator[T]:
        return _arriving_here(
            lambda take: self._background.deliver(self._items, take, END), self.cancel
        )


async def _arriving_here(
    begin: Callable[[Callable[[Arrival], None]], None], cancel: Cancellation
) -> AsyncIterator[Any]:
    """Yield, in this event loop, items that another thread passes on."""
    here = asyncio.get_running_loop()
    arrived: asyncio.Queue[Arrival] = asyncio.Queue()

    def take(item: Arrival) -> None:
        if not here.is_closed():
            here.call_soon_threadsafe(arrived.put_nowait, item)

    begin(take)
    try:
        while (item := await arrived.get()) is not END:
            yield _item(item)
    finally:
        cancel.set()


def _item(arrived: Arrival) -> Any:
    if isinstance(arrived, BaseException):
        raise arrived
    return arrived
