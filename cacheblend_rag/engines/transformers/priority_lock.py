"""A lock around the model: requests take priority over background filling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock

QUIET_SECONDS = 0.02
"""How long nobody must have driven a model for it to be idle: requests pause for less."""


class PriorityLock:
    """The turns of one model, a layer or a decode step each."""

    def __init__(self) -> None:
        self._driving, self._counting = RLock(), Lock()
        self._wanted, self._left_at = 0, -QUIET_SECONDS

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take a turn for somebody who waits for what comes of it."""
        with self._counting:
            self._wanted += 1
        try:
            with self._driving:
                yield
        finally:
            with self._counting:
                self._wanted, self._left_at = self._wanted - 1, time.monotonic()

    @property
    def is_quiet(self) -> bool:
        """Whether nobody has driven the model for long enough that it is idle."""
        return self._quiet_in() <= 0

    @contextmanager
    def left_over(self, patience_seconds: float) -> Iterator[bool]:
        """Take a turn that nobody else has use for; yields whether there was one within patience.

        Whoever asks for a turn meanwhile waits for the end of this one.
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
        """Return seconds until nobody has driven the model for long enough, as it looks now."""
        with self._counting:
            if self._wanted:
                return QUIET_SECONDS
            return self._left_at + QUIET_SECONDS - time.monotonic()
