"""A circuit breaker: keeps a failing tier from being used for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0


class OutError(OSError):
    """The tier was skipped, since it failed recently."""


class Breaker:
    """Allows calls until one fails; then one trial call at a time, at growing intervals.

    A call gets a permit and reports its result with it, so that calls which began before a failure
    change nothing when they end after it. clock: monotonic seconds.
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
        """Whether calls are blocked."""
        return self._until is not None

    @property
    def is_failing(self) -> bool:
        """Whether calls are blocked, or the last one failed."""
        return self._failing

    def ask(self) -> int | None:
        """Return a permit for a call, None while calls are blocked."""
        with self._lock:
            return self._permit if self._until is None else None

    def ask_for_trial(self) -> int | None:
        """Return a permit for the trial call, None if none is due."""
        with self._lock:
            if self._until is None or self.clock() < self._until:
                return None
            self._permit += 1
            self._until = self.clock() + MOST_SECONDS  # for a trial that never ends
            return self._permit

    def succeeded(self, permit: int) -> None:
        """Allow calls again."""
        with self._lock:
            if permit == self._permit:
                self._failing, self._until, self._seconds = False, None, FIRST_SECONDS

    def failed(self, permit: int, *, trips: bool = True) -> None:
        """Block calls if ``trips``; after a failed trial, for longer than before."""
        with self._lock:
            if permit != self._permit:
                return
            self._failing = True
            if trips or self._until is not None:
                self._permit += 1
                self._until = self.clock() + self._seconds
                self._seconds = min(2 * self._seconds, MOST_SECONDS)

    def withdrawn(self, permit: int) -> None:
        """Ignore a call that ended without a result: a trial may follow at once."""
        with self._lock:
            if permit == self._permit and self._until is not None:
                self._until = self.clock()
