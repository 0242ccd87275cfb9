"""Reads the machine's counters: who used the CPUs, and how much memory is available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

BUSY_OTHERS = 0.25
"""The machine is busy if other processes use this share of the CPUs, and less is idle than:"""
BUSY_IDLE = 0.15
BUSY_STEAL = 0.1
"""Share of the CPUs that the hypervisor gave to other machines."""


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time since the machine started, over the CPUs that this process may use.

    own: of this process. busy: of any process. steal: given to other virtual machines.
    """

    own: float
    busy: float
    idle: float
    steal: float

    @classmethod
    def now(cls) -> CpuSeconds | None:
        """Return the time so far; None if the system does not count some of these CPUs."""
        process, every = psutil.Process(), psutil.cpu_times(percpu=True)
        usable = process.cpu_affinity() if psutil.LINUX else range(len(every))
        if not every or max(usable) >= len(every):
            return None
        own, counted = process.cpu_times(), [every[cpu] for cpu in usable]
        # Linux counts the guests' time in user and nice, too.
        names = ("user", "nice", "system", "irq", "softirq")
        return cls(
            own.user + own.system,
            busy=_sum(counted, *names),
            idle=_sum(counted, "idle", "iowait"),
            steal=_sum(counted, "steal"),
        )


def _sum(counted: list[Any], *names: str) -> float:
    return sum(getattr(one, name, 0.0) for one in counted for name in names)


@dataclass(frozen=True)
class CpuLoad:
    """Who used the CPUs during a measurement, as shares of all their time.

    own: this process. other: all other processes. steal: other virtual machines. idle: nobody.
    """

    own: float
    other: float
    steal: float
    idle: float

    @classmethod
    def between(cls, before: CpuSeconds | None, after: CpuSeconds | None) -> CpuLoad | None:
        """Return the load between two readings; None without them, or without time between."""
        if before is None or after is None:
            return None
        busy, idle = after.busy - before.busy, after.idle - before.idle
        steal, own = after.steal - before.steal, after.own - before.own
        total = busy + idle + steal
        if total <= 0:
            return None
        other = max(0.0, busy - own)
        return cls(min(1.0, own / total), other / total, steal / total, idle / total)

    @property
    def is_busy(self) -> bool:
        """Whether others took CPU time that the measurement wanted."""
        crowded = self.other >= BUSY_OTHERS and self.idle < BUSY_IDLE
        return crowded or self.steal >= BUSY_STEAL


def available_bytes(device: Any = None) -> int:
    """Return the memory that can be allocated on a torch.device; the host's but for CUDA."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
