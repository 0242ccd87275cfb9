"""Ends: whether an engine is open, and native work that must be done before the interpreter exits.

A daemon thread that returns from native code after the interpreter has ended is killed there,
inside frames of C++ and Rust, which abort the process (SIGABRT). So threads announce such work; at
exit, running work may finish, and new work blocks until the process ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from cacheblend_rag.errors import ConfigError

T = TypeVar("T")

CLOSED = "the engine is closed: open another"
ITS_OWN_THREAD = (
    "the engine is called in the thread that makes its answers (a hook after an answer?): call it "
    "from an IdleJob or from another thread"
)
WAIT_SECONDS = 10.0


class Lifetime:
    """The lifetime of an engine, which ends with that of the engine it is a sibling of.

    elder: the lifetime of the engine that a sibling was made from, None for any other engine.
    """

    def __init__(self, elder: Lifetime | None = None) -> None:
        self.elder = elder
        self._pid, self._closed = os.getpid(), False

    @property
    def is_open(self) -> bool:
        """Whether neither this engine nor the one it is a sibling of was closed."""
        return not self._closed and (self.elder is None or self.elder.is_open)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that opened the engine."""
        return os.getpid() != self._pid

    def end(self) -> bool:
        """Close; returns False if it was closed already."""
        was_closed, self._closed = self._closed, True
        return not was_closed

    def check(self) -> None:
        """Raise ConfigError if the engine is closed, or in a forked process."""
        if not self.is_open:
            raise ConfigError(CLOSED)
        if self.is_forked:
            raise ConfigError(
                f"the engine was opened in process {self._pid}, and its threads do not exist"
                f" in this forked one: open an engine in process {os.getpid()}"
            )


class _Gate:
    """Counts running work, and closes permanently."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._closed = False

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._working, WAIT_SECONDS)


_gate = _Gate()
working = _gate.open
"""``with working():`` around a short piece of native work; not within another."""

atexit.register(_gate.close)


async def in_thread(work: Callable[[], T]) -> T:
    """Return what work returns in a thread of its own, which never holds up the process's exit.

    Cancelling does not stop the work; then its result is lost.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], outcome: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if done.done() else settle(outcome))

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # the request's, whatever it is
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    threading.Thread(target=run, name="cacheblend-work", daemon=True).start()
    return await done
