"""Steps: work done a piece at a time, so that others get their turn in between."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields whenever others may have their turn; returns what the work made."""
