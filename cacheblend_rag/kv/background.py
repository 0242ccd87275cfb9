"""Runs a function in a new thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
BESIDE_BYTES = 1 << 22
"""Bytes from which on a second thread for digests costs less than it saves."""


def begin(work: Callable[[], T]) -> Future[T]:
    """Run work in a new thread.

    No pool: pools accept no work while a process exits, but chunks may be written then. If no
    thread can be started either, the work runs in the calling thread.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # passed on to whoever waits for the result
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="kv-digests").start()
    except RuntimeError:
        run()
    return done
