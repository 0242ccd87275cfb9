"""Tracks whether an engine is open, in the process that opened it."""

from __future__ import annotations

import os

from cacheblend_rag.engines.background import CLOSED
from cacheblend_rag.errors import ConfigError


class Lifetime:
    """The lifetime of an engine, which ends with that of the engine it is a sibling of.

    elder: the lifetime of the engine that a sibling was made from, None for any other engine.
    """

    def __init__(self, elder: Lifetime | None = None) -> None:
        self.elder = elder
        self._pid, self._closed = os.getpid(), False

    @property
    def is_open(self) -> bool:
        """Whether neither this engine nor the one it is a sibling of was closed."""
        return not self._closed and (self.elder is None or self.elder.is_open)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that opened the engine."""
        return os.getpid() != self._pid

    def end(self) -> bool:
        """Close; returns False if it was closed already."""
        was_closed, self._closed = self._closed, True
        return not was_closed

    def check(self) -> None:
        """Raise ConfigError if the engine is closed, or in a forked process."""
        if not self.is_open:
            raise ConfigError(CLOSED)
        if self.is_forked:
            raise ConfigError(
                f"the engine was opened in process {self._pid}, and its threads do not exist"
                f" in this forked one: open an engine in process {os.getpid()}"
            )
