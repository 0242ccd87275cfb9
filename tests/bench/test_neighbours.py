"""Processes that compute beside a benchmark."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from cacheblend_rag.bench.neighbours import neighbours


def test_they_compute_until_the_benchmark_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
        made.append(start(*given, **named))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(ZeroDivisionError):
        use(made)
    assert len(made) == 2
    assert all(process.poll() is not None for process in made)


def use(made: list[subprocess.Popen[bytes]]) -> None:
    with neighbours(2):
        before = [used(process.pid) for process in made]
        until = time.monotonic() + 60
        while any(used(p.pid) <= b for p, b in zip(made, before, strict=True)):
            assert time.monotonic() < until, "they do nothing"
            time.sleep(0.05)
        _ = 1 / 0


def used(pid: int) -> int:
    """Return how long a process has computed, in clock ticks."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[11])


def test_none_are_started_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with neighbours(0):
        pass
