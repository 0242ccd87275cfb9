"""Stops background work before the interpreter exits.

A daemon thread that returns from native code after the interpreter has ended is killed there,
inside frames of C++ and Rust, which abort the process (SIGABRT). So threads announce such work; at
exit, running work may finish, and new work blocks until the process ends.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_SECONDS = 10.0


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
