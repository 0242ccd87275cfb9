"""Reads and writes sizes and times as people do: ``8GiB``, ``12h``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from cacheblend_rag.errors import ConfigError

BYTE_UNITS: Mapping[str, int] = {
    "": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
QUANTITY = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*"
"""A number and a unit, as a regular expression."""
SECOND_UNITS: Mapping[str, int] = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_bytes(name: str, value: object) -> int | None:
    """Return a size in bytes; text may name a unit, such as ``"8GiB"``. Raises ConfigError."""
    if isinstance(value, str):
        return int(_quantity(name, value, BYTE_UNITS, "a size, such as 8GiB"))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 0")
    return value


def read_seconds(name: str, value: object) -> float | None:
    """Return a time above 0 in seconds; text may name a unit, as ``"12h"``. Raises ConfigError."""
    if isinstance(value, str):
        value = _quantity(name, value, SECOND_UNITS, "a time, such as 12h")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r:.100} must be a number above 0")
    return value


def _quantity(name: str, text: str, units: Mapping[str, int], wanted: str) -> float:
    """Read a number with one of ``units`` behind it."""
    found = re.fullmatch(QUANTITY, text)
    unit = units.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{name}={text!r:.100} must be {wanted}")
    return float(found[1]) * unit


def size(nbytes: float) -> str:
    """Return bytes in the largest binary unit that is not larger."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
