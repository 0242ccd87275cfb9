"""An event loop on a thread, which runs coroutines up to a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads, and cancels them at their deadline.

    So nothing is left behind: the caller continues, and the cancelled request's connection is
    closed. The thread starts with the first coroutine and ends with ``close``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def result(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the result of ``work``, or raise its error; OSError after the deadline."""
        try:
            loop = self._started()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(_within(work, seconds), loop)
        try:
            return future.result()
        finally:
            future.cancel()  # the waiting thread may be interrupted

    def close(self) -> None:
        """End the thread; later work starts another one."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    loop.close()
                    raise OSError(str(error)) from error
                self._loop = loop
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel_all())
    finally:
        loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise OSError(f"the whole answer did not arrive within {seconds:g} s") from error
