"""Stops background work before the interpreter exits.

A daemon thread that comes back from native code into an interpreter that has ended is ended there,
in the middle of frames of C++ and Rust, which end the whole process by SIGABRT. So threads announce
such work, and at exit whoever is at it may finish; whoever begins waits for the end.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_SECONDS = 10.0


class _Gate:
    """Counts work that is being done, and closes once for all."""

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
