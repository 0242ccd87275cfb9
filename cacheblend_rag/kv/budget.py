"""Limits on reading ahead that all running prompts share."""

from __future__ import annotations

import threading


class Reservation:
    """A part of a budget, released explicitly or when this object is garbage-collected.

    So an interrupt at any point releases it, too.
    """

    __slots__ = ("_of", "size")

    def __init__(self, of: Budget) -> None:
        self._of, self.size = of, 0

    def give_back(self, _: object = None) -> None:
        """Release it, once; can be used as a future's done callback."""
        self._of.regain(self)

    def __del__(self) -> None:
        self.give_back()


class Budget:
    """Bytes, or slots, that all prompts share. left: those that are free."""

    def __init__(self, size: int) -> None:
        # Reentrant: a reservation may be collected, and given back, while its thread holds it.
        self.left, self._lock = size, threading.RLock()

    def take(self, size: int, *, anyway: bool = False) -> Reservation | None:
        """Reserve an amount; None if there is less left.

        anyway: reserve it even if there is less left, since it is needed now.
        """
        taken = Reservation(self)
        with self._lock:
            if size > self.left and not anyway:
                return None
            # Both or neither: no interrupt comes between two assignments.
            self.left -= size
            taken.size = size
        return taken

    def regain(self, taken: Reservation) -> None:
        """Return a reserved amount."""
        with self._lock:
            self.left += taken.size
            taken.size = 0
