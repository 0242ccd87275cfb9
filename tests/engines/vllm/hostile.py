"""What strangers may put into a request: values that are not what they should be."""

from __future__ import annotations

import math
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**5000, 1e308, math.nan, math.inf, "", "abc", "\ud800", "0" * 32,
    "x" * 100_000, [], {}, [[]], {"a": {}}, [0] * 10_000, {"\ud800": 1}, [None], [1, "2"],
    [math.nan],
)  # fmt: skip


def nested(depth: int) -> Any:
    """Return a list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mutated(value: Any, draw: random.Random, deepest: int = 2_000) -> Any:
    """Return a value with something in it replaced, left out or added."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return nested(draw.randrange(deepest)) if draw.random() < 0.02 else draw.choice(HOSTILE)
    changed = dict(value) if isinstance(value, dict) else list(value)
    index = draw.choice(list(changed)) if isinstance(value, dict) else draw.randrange(len(value))
    change = draw.random()
    if change < 0.1:
        del changed[index]
    elif change < 0.2 and isinstance(changed, dict):
        changed[draw.choice(["colour", "", "x" * 1000])] = draw.choice(HOSTILE)
    else:
        changed[index] = mutated(value[index], draw, deepest)
    return changed
