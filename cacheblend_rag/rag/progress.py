"""Progress callbacks; silent by default."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Task:
    """One of several things at work. This one tells nobody."""

    def note(self, what: str) -> None:
        """Say what is being done with it now."""

    def advance(self, steps: int = 1) -> None:
        """Say that so many more of its steps are done."""

    def end(self) -> None:
        """Say that it is done."""


class Watcher:
    """Logs phases and warnings, and shows no tasks; a terminal's subclass shows all three."""

    def warn(self, message: str) -> None:
        """Tell of something that the user should know."""
        logger.warning(message)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell what is being done while the block runs."""
        logger.info(name)
        yield

    def begin(self, name: str, steps: int) -> Task:
        """Tell of something to be done in so many steps."""
        return Task()
