"""Runs work once in a thread of its own, beside the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
BESIDE_BYTES = 1 << 22
"""From so many on, a thread that takes or checks digests costs less than it saves."""


def begin(work: Callable[[], T]) -> Future[T]:
    """Have work done on a thread of its own.

    No pool: those take nothing any more while a process ends, and what waits is written then. Where
    no thread is started any more, either, it is done here.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # whoever waits for it is told
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="kv-digests").start()
    except RuntimeError:
        run()
    return done
