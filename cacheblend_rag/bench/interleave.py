"""Runs the cases of a benchmark in turn, so that changes of the machine affect all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Case = Callable[[int], float]
"""One case to measure: takes the number of the turn (0 is the warm-up), returns seconds."""

Advance = Callable[[str], None]
"""Called with the label of the next step, for a progress display."""


def run_in_turns(
    cases: Mapping[str, Case], repeat: int, advance: Advance
) -> dict[str, list[float]]:
    """Run every case once per turn, starting with a different one; return each one's seconds.

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
