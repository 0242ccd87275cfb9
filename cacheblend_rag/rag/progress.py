"""Progress callbacks; silent by default."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend_rag.printable import one_line

logger = logging.getLogger(__name__)


class Task:
    """A piece of work with steps. This one shows nothing."""

    def note(self, what: str) -> None:
        """Show what is being done now."""

    def advance(self, steps: int = 1) -> None:
        """Add completed steps."""

    def end(self) -> None:
        """Mark it as completed."""


class ProgressCallbacks:
    """Logs phases and warnings, and shows no tasks; a terminal's subclass shows all three."""

    def warn(self, message: str) -> None:
        """Show a warning to the user."""
        logger.warning(one_line(message))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase's name while the block runs."""
        logger.info(one_line(name))
        yield

    def begin(self, name: str, steps: int) -> Task:
        """Begin a task.

        Args:
            name: of the task.
            steps: how many it has.

        Returns:
            What shows its steps; this one shows nothing.
        """
        return Task()
