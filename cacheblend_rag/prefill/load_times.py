"""The time that a pass spends waiting for stored KV, and copying it into its buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class LoadTimes:
    """Seconds since the last ``take``: of waiting by tier, and of copying.

    starts: readings of ``time.perf_counter`` when the phases ``load`` and ``lay_in`` first began.
    laid: all seconds of copying so far.
    """

    def __init__(self) -> None:
        self.starts: dict[str, float] = {}
        self.laid = self._taken = 0.0
        self._waits: dict[str, float] = {}

    @contextmanager
    def laying(self) -> Iterator[None]:
        """Count the time inside as copying.

        On an accelerator that is the time to queue the copies, which it makes later.
        """
        began = time.perf_counter()
        self.starts.setdefault("lay_in", began)
        try:
            yield
        finally:
            self.laid += time.perf_counter() - began

    def waited(self, began: float, seconds: Mapping[str, float]) -> None:
        """Add a wait, by tier."""
        self.starts.setdefault("load", began)
        for tier, share in seconds.items():
            self._waits[tier] = self._waits.get(tier, 0.0) + share

    def take(self) -> tuple[dict[str, float], float]:
        """Return the seconds of waiting by tier, and of copying; counting begins anew."""
        waits, self._waits = self._waits, {}
        laid, self._taken = self.laid - self._taken, self.laid
        return waits, laid
