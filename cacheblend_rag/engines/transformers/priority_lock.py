"""A lock around the model: requests take priority over background filling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock

QUIET_SECONDS = 0.02
"""Seconds without use after which a model counts as idle; requests pause for less."""


class PriorityLock:
    """A lock around one model: requests hold it for a layer or a decode step at a time."""

    def __init__(self) -> None:
        self._driving, self._counting = RLock(), Lock()
        self._wanted, self._left_at = 0, -QUIET_SECONDS

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Keep background work from the lock, without holding it."""
        with self._counting:
            self._wanted += 1
        try:
            yield
        finally:
            with self._counting:
                self._wanted, self._left_at = self._wanted - 1, time.monotonic()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock for a request."""
        with self.wanted(), self._driving:
            yield

    @property
    def is_quiet(self) -> bool:
        """Whether no request has used the model for long enough that it is idle."""
        return self._quiet_in() <= 0

    @contextmanager
    def left_over(self, patience_seconds: float) -> Iterator[bool]:
        """Hold the lock for background work if the model gets idle within ``patience_seconds``.

        Yields whether it did. A request that wants the lock meanwhile waits for its release.
        """
        end = time.monotonic() + patience_seconds
        while (wait := self._quiet_in()) > 0 and time.monotonic() < end:
            time.sleep(wait)
        is_mine = wait <= 0 and self._driving.acquire(blocking=False)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._driving.release()

    def _quiet_in(self) -> float:
        """Return the seconds until the model counts as idle."""
        with self._counting:
            if self._wanted:
                return QUIET_SECONDS
            return self._left_at + QUIET_SECONDS - time.monotonic()
