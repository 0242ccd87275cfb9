"""What options of several commands have in common."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """Let a number through that is one; ranges let NaN pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number")
    return value
