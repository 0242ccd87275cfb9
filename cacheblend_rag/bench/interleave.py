"""Measuring several things fairly: in turn, on the same machine at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Case = Callable[[int], float]
"""One thing to measure: given the turn, 0 is the warm-up, it returns seconds."""

Advance = Callable[[str], None]
"""Is told what is done next, for a progress display."""


def run_in_turns(
    cases: Mapping[str, Case], repeat: int, advance: Advance
) -> dict[str, list[float]]:
    """Run every case once a turn, each turn beginning with another; return each one's seconds.

    Turn 0 is a warm-up and is not returned.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(repeat + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            advance(f"turn {turn} of {repeat}: {name}" if turn else f"warm-up: {name}")
            taken = cases[name](turn)
            seconds[name] += [taken] if turn else []
    return seconds
