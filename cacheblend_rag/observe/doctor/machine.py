"""Reads the machine's counters: who used the CPUs, and how much memory is available."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY_OTHERS = 0.25
"""Others use so much of the CPUs, with hardly any left idle: the machine is busy."""
BUSY_IDLE = 0.15
BUSY_STEAL = 0.1
"""Share of the CPUs that the hypervisor gave to other machines."""


@dataclass(frozen=True)
class CpuCounters:
    """Seconds of CPU time since the machine started, over the CPUs that this process may use.

    Args:
        cpus: how many these are.
        busy: used by any process.
        idle: unused.
        steal: given to other virtual machines.
        own: used by this process, its threads included.
    """

    cpus: int
    busy: float
    idle: float
    steal: float
    own: float


@dataclass(frozen=True)
class CpuLoad:
    """Who used the CPUs during a measurement, as shares of all their time.

    Args:
        own: this process.
        other: all other processes.
        steal: other virtual machines.
        idle: nobody.
    """

    own: float
    other: float
    steal: float
    idle: float

    @classmethod
    def between(cls, before: CpuCounters | None, after: CpuCounters | None) -> CpuLoad | None:
        """Return the load between two readings; None if there are none, or of other CPUs each."""
        if before is None or after is None or before.cpus != after.cpus:
            return None
        busy, idle = after.busy - before.busy, after.idle - before.idle
        steal, own = after.steal - before.steal, after.own - before.own
        total = busy + idle + steal
        if total <= 0:
            return None
        return cls(
            own=min(1.0, own / total),
            other=max(0.0, busy - own) / total,
            steal=steal / total,
            idle=idle / total,
        )

    @property
    def is_busy(self) -> bool:
        """Whether others took CPU time that the measurement wanted."""
        crowded = self.other >= BUSY_OTHERS and self.idle < BUSY_IDLE
        return crowded or self.steal >= BUSY_STEAL


class Machine:
    """The counters of the machine that this process runs on; tests have their own."""

    def counters(self) -> CpuCounters | None:
        """Return the CPU counters; None on systems other than Linux, or if some CPUs have none."""
        try:
            usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = Path("/proc/stat").read_text().splitlines()
        except (OSError, AttributeError):
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        rows = [line.split() for line in lines if line.partition(" ")[0] in usable]
        if len(rows) != len(usable):
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted as user
        spent = [[int(field) / ticks for field in row[1:9]] for row in rows]
        times = os.times()
        return CpuCounters(
            cpus=len(rows),
            busy=sum(sum(one[:3]) + sum(one[5:7]) for one in spent),
            idle=sum(sum(one[3:5]) for one in spent),
            steal=sum(one[7] for one in spent),
            own=times.user + times.system,
        )

    def available_bytes(self, device: Any = None) -> int | None:
        """Return the memory that can be allocated on a device; None if that is unknown.

        device: a torch.device; None, and devices other than CUDA ones, are the host.
        """
        if getattr(device, "type", "cpu") == "cuda":
            import torch

            return int(torch.cuda.mem_get_info(device)[0])
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(found[0]) * 1024 if found else None
