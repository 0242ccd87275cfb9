"""Breaker: whether a tier is asked at all, or left alone for a while because it failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0


class OutError(OSError):
    """The tier was not asked: it failed a moment ago."""


class Breaker:
    """Lets calls through until one fails; then one trial at a time, ever more rarely.

    A call is given a permit and says with it how it ended, so that calls which began before the
    failure change nothing when they end after it. clock: seconds that only rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._permit = 0
        self._failing = False
        self._seconds = FIRST_SECONDS
        self._until: float | None = None

    @property
    def is_out(self) -> bool:
        """Whether calls are held back."""
        return self._until is not None

    @property
    def is_failing(self) -> bool:
        """Whether calls are held back, or the last one failed."""
        return self._failing

    def after_fork(self) -> None:
        """Go on in a forked process, where whoever held the lock is no more."""
        self._lock = threading.Lock()

    def ask(self) -> int | None:
        """Return a permit for a call, None while calls are held back."""
        with self._lock:
            return self._permit if self._until is None else None

    def ask_for_trial(self) -> int | None:
        """Return a permit for the one call that may end the time out, None where none is due."""
        with self._lock:
            if self._until is None or self.clock() < self._until:
                return None
            self._permit += 1
            self._until = self.clock() + MOST_SECONDS  # for a trial that never ends
            return self._permit

    def succeeded(self, permit: int) -> None:
        """Let calls through."""
        with self._lock:
            if permit == self._permit:
                self._failing, self._until, self._seconds = False, None, FIRST_SECONDS

    def failed(self, permit: int, *, trips: bool = True) -> None:
        """Hold calls back, if ``trips``, or longer than last time."""
        with self._lock:
            if permit != self._permit:
                return
            self._failing = True
            if trips or self._until is not None:
                self._hold_back()

    def withdrawn(self, permit: int) -> None:
        """Take back a call that ended without telling anything: a trial may follow at once."""
        with self._lock:
            if permit == self._permit and self._until is not None:
                self._until = self.clock()

    def _hold_back(self) -> None:
        self._permit += 1
        self._until = self.clock() + self._seconds
        self._seconds = min(2 * self._seconds, MOST_SECONDS)
