"""Quantities in words."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Return bytes in the largest binary unit that they fill."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
