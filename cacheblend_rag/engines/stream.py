"""Streams of an answer's pieces, which an engine's own thread or event loop makes.

A stream can be read by a thread, or in an event loop, which is never blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread
from typing import Any, Generic, TypeAlias, TypeVar, cast

from cacheblend_rag.engines.lifetime import CLOSED, ITS_OWN_THREAD
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


# An event loop in a thread of its own


class BackgroundLoop:
    """Runs coroutines for threads that wait for them. Raises ConfigError once closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting, self._closed = Lock(), False
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called yet."""
        return self._thread.is_alive() and not self._closed

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work``; refused while the loop closes, since it would never be finished."""
        with self._starting:
            if self.is_open:
                return asyncio.run_coroutine_threadsafe(self._known(work), self.loop)
        work.close()
        raise ConfigError(CLOSED)

    async def _known(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` as a task that ``close`` cancels; libraries start tasks of their own."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def check_may_wait(self) -> None:
        """Raise ConfigError in the loop's own thread, which would wait for itself for ever."""
        if self.is_open and current_thread() is self._thread:
            raise ConfigError(ITS_OWN_THREAD)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; interrupting the caller cancels it."""
        try:
            self.check_may_wait()
        except ConfigError:
            work.close()
            raise
        future = self.start(work)
        try:
            return result_of(future)
        except BaseException:
            future.cancel()
            raise

    def stream(self, items: AsyncIterator[T], cancel: Cancellation) -> Stream[T]:
        """Return a stream of items that are made in this loop; its last item may be None."""

        async def work(take: Take[T]) -> T:
            item: Any = None
            async for item in items:
                take(item)
            return cast(T, item)

        return Stream(lambda take: self.start(work(take)), cancel, self.check_may_wait)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel running work, run ``last``, end the thread; nothing starts meanwhile."""
        with self._starting:
            if not self.is_open:
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(last), self.loop).result()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        await _cancel(self._tasks)
        try:
            if last is not None:
                await last()
        finally:
            await _cancel(asyncio.all_tasks())


class GivenLoop(BackgroundLoop):
    """The loop that this is made in, which runs for as long as others want it to.

    Raises RuntimeError where no loop runs.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = current_thread()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting, self._closed = Lock(), False

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called yet, and the loop can run work."""
        return not self._closed and not self.loop.is_closed()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel running work, without waiting for its end; the loop, and ``last``, are left."""
        with self._starting:
            if not self.is_open:
                return
            self._closed = True
        self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    others = tasks - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
