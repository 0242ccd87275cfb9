"""``Steps``: a generator type for work that other requests may interrupt."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A generator that yields whenever other work may run; returns the result."""


def run_to_end(steps: Steps[T]) -> T:
    """Run steps without other work in between, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
