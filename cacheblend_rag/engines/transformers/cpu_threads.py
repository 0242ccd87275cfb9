"""Runs short CPU operations on as many threads as other processes leave CPUs for.

A parallel operation ends with its slowest thread. A thread whose CPU another process uses waits for
its turn, some milliseconds, and a blend or a decode step has thousands of operations shorter than
that. On one thread less, none waits. Long operations, those of ordinary prefill, keep all threads:
they wait as seldom as they are few, and more threads get more of a crowded CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cacheblend_rag.engines.machine import CpuCounters, CpuLoad, Machine

WINDOW_SECONDS = 0.2
"""The load is that of the time since it was last read, at least so long: counters are coarse."""
IGNORED_CPUS = 0.4
"""So much CPU time a second of other processes costs no thread."""


class CpuThreads:
    """Limits the threads of PyTorch's CPU operations by what other processes use of the CPUs.

    The limit is of the thread that runs the operations, but PyTorch passes it on to threads that
    use it for the first time meanwhile. machine: has the counters. clock: seconds.
    """

    def __init__(
        self, machine: Machine | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine, self._clock, self._reading = machine or Machine(), clock, threading.Lock()
        self._counters: CpuCounters | None = None
        self._read_at = -WINDOW_SECONDS
        self._free: int | None = None
        self._limits = set[int]()
        self._usual = 1

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Run PyTorch's CPU operations on at most as many threads as there are free CPUs."""
        now = torch.get_num_threads()
        if now not in self._limits:  # otherwise it may be a limit that was passed on
            self._usual = now
        usual, free = self._usual, self._free_cpus()
        count = usual if free is None else max(1, min(usual, free))
        if count != usual:
            self._limits.add(count)
        if count != now:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            if count != usual:
                torch.set_num_threads(usual)

    def _free_cpus(self) -> int | None:
        """Return how many CPUs other processes leave; None where the system does not tell."""
        with self._reading:
            now = self._clock()
            if now - self._read_at >= WINDOW_SECONDS:
                before, self._read_at = self._counters, now
                after = self._counters = self._machine.counters()
                load = CpuLoad.between(before, after)
                if load is not None and after is not None:
                    self._free = int(after.cpus * (1 - load.other) + IGNORED_CPUS)
            return self._free


cpu_threads = CpuThreads()
"""Of this process."""
