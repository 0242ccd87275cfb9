"""What strangers may put into a request: values that are not what they should be."""

from __future__ import annotations

import math
import random
from typing import Any

from tests.contracts import wire

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**5000, 1e308, math.nan, math.inf, "", "abc", "\ud800", "0" * 32,
    "x" * 100_000, [], {}, [[]], {"a": {}}, [0] * 10_000, {"\ud800": 1}, [None], [1, "2"],
    [math.nan],
)  # fmt: skip


def mutated(value: Any, draw: random.Random, deepest: int = 2_000) -> Any:
    """Return a value with something in it replaced, left out or added."""
    return wire.mutated(value, draw, deepest, HOSTILE)
