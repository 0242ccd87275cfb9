"""Who used the CPUs, by the difference of two readings."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
import torch

from cacheblend_rag.observe.doctor.machine import CpuCounters, CpuLoad, Machine

START = CpuCounters(cpus=2, busy=100.0, idle=900.0, steal=1.0, own=10.0)


def after(busy: float, idle: float, steal: float = 0.0, own: float = 0.0) -> CpuCounters:
    return CpuCounters(2, 100.0 + busy, 900.0 + idle, 1.0 + steal, 10.0 + own)


def test_what_this_process_does_not_use_is_the_others() -> None:
    load = CpuLoad.between(START, after(busy=6, idle=2, steal=2, own=5))
    assert load == CpuLoad(own=0.5, other=pytest.approx(0.1), steal=0.2, idle=0.2)


@pytest.mark.parametrize(
    ("now", "is_busy"),
    [
        (after(busy=5, idle=5, own=5), False),
        (after(busy=10, idle=0, own=10), False),
        (after(busy=10, idle=0, own=5), True),
        (after(busy=7, idle=3, own=3), False),
        (after(busy=8, idle=0, steal=2, own=8), True),
    ],
    ids=["alone", "all CPUs for itself", "shared", "room for all", "stolen"],
)
def test_a_machine_is_busy_when_others_leave_nothing(now: CpuCounters, is_busy: bool) -> None:
    load = CpuLoad.between(START, now)
    assert load is not None
    assert load.is_busy == is_busy


def test_without_counters_nothing_is_known() -> None:
    assert CpuLoad.between(None, START) is None
    assert CpuLoad.between(START, None) is None
    assert CpuLoad.between(START, START) is None
    assert CpuLoad.between(START, replace(after(busy=6, idle=2), cpus=1)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="counters are Linux's")
def test_this_machine_counts_what_this_process_uses() -> None:
    machine = Machine()
    before = machine.counters()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    now = machine.counters()
    assert before is not None
    assert now is not None
    assert 0.25 < now.own - before.own < 1.0
    assert now.busy - before.busy >= 0.25
    assert 1 <= now.cpus == before.cpus
    available = machine.available_bytes(torch.device("cpu"))
    assert available is not None
    assert available > 1 << 20
