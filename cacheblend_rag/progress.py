"""Progress callbacks, silent by default; a line on stderr where nothing else shows a task."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cacheblend_rag.printable import one_line

logger = logging.getLogger(__name__)

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 15.0
"""Between two states of a task that are shown."""


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


class _Line(Task):
    """A line on stderr that says how far a task has come; in a log, a new one for each state."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps, self._done, self._due = one_line(name), steps, 0, 0.0
        self._is_terminal = sys.stderr.isatty()
        self.advance(0)

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        if (now := time.monotonic()) < self._due and self._done < self._steps:
            return
        self._due = now + (TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS)
        share = 100 * self._done // self._steps
        line = f"{self._name}: {self._done} of {self._steps} ({share} %)"
        sys.stderr.write(f"\r{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")


_displays: list[Callable[[str, int], Task]] = [_Line]


def begin_task(name: str, steps: int) -> Task:
    """Begin a task that no caller asked to be shown, on the innermost display of ``shown_by``."""
    return _displays[-1](name, steps)


@contextmanager
def shown_by(callbacks: ProgressCallbacks) -> Iterator[None]:
    """Show such tasks by callbacks, in place of a line on stderr."""
    _displays.append(callbacks.begin)
    try:
        yield
    finally:
        _displays.remove(callbacks.begin)
