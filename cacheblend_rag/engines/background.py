"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar, cast

from cacheblend_rag.engines.lifetime import CLOSED, ITS_OWN_THREAD
from cacheblend_rag.engines.stream import Cancellation, Stream, Take, result_of
from cacheblend_rag.errors import ConfigError

T = TypeVar("T")


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
