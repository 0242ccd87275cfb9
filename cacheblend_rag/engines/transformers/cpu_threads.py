"""Runs short CPU operations on as many threads as other processes leave CPUs for.

A parallel operation ends with its slowest thread. A thread whose CPU another process uses waits for
its turn, some milliseconds, and a blend or a decode step has thousands of operations shorter than
that. On one thread less, none waits. Ordinary prefill keeps all threads, except for attention by
matrix products: the rest of it has few operations, so waiting costs little, and more threads get a
larger share of a crowded CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cacheblend_rag.engines.machine import CpuCounters, CpuLoad, Machine

WINDOW_SECONDS = 0.2
"""Least time between readings of the CPU counters, which are too coarse for shorter times."""
IGNORED_CPUS = 0.4
"""Other processes may use this many CPUs without costing a thread."""


class CpuThreads:
    """Limits the threads of PyTorch's CPU operations by what other processes use of the CPUs.

    machine: has the counters. clock: seconds.

    A limit is one of the thread that runs the operations. But PyTorch passes it on to threads that
    use PyTorch for the first time meanwhile: ``usual`` gives those of the engine all threads again.
    """

    def __init__(
        self, machine: Machine | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine, self._clock, self._reading = machine or Machine(), clock, threading.Lock()
        self._counters: CpuCounters | None = None
        self._read_at = -WINDOW_SECONDS
        self._cpus = self._free = 0
        self._limits = set[int]()
        self._usual: int | None = None
        self._threads = threading.local()
        self._is_fixed = False

    def usual(self) -> int:
        """Return how many threads this thread's operations run on without a limit.

        If another thread's limit was passed on to it, that ends here.
        """
        now = torch.get_num_threads()
        is_known = getattr(self._threads, "is_known", False)
        self._threads.is_known = True
        if not is_known and self._usual is not None and now in self._limits:
            torch.set_num_threads(self._usual)
            return self._usual
        self._usual = now
        return now

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Run PyTorch's CPU operations on at most as many threads as there are free CPUs."""
        usual = self.usual()
        count = self._count(usual)
        if count == usual:
            yield
            return
        self._limits.add(count)
        torch.set_num_threads(count)
        # vLLM's CPU worker replaces the function by one that warns.
        self._is_fixed = torch.get_num_threads() != count
        try:
            yield
        finally:
            if not self._is_fixed:
                torch.set_num_threads(usual)

    def _count(self, usual: int) -> int:
        """Return how many threads to use; without a limit, as many as usual."""
        if usual == 1 or self._is_fixed:
            return usual
        cpus, free = self._load()
        # Threads that are bound to single CPUs, as by OMP_PROC_BIND, see no others.
        return usual if cpus < usual else max(1, min(usual, free))

    def _load(self) -> tuple[int, int]:
        """Return how many CPUs there are, and how many other processes leave free.

        Both are 0 where the system has no such counters, or has been read only once.
        """
        with self._reading:
            now = self._clock()
            if now - self._read_at >= WINDOW_SECONDS:
                before, self._read_at = self._counters, now
                after = self._counters = self._machine.counters()
                load = CpuLoad.between(before, after)
                self._cpus, self._free = 0, 0
                if load is not None and after is not None:
                    self._cpus = after.cpus
                    self._free = int(after.cpus * (1 - load.other) + IGNORED_CPUS)
            return self._cpus, self._free


cpu_threads = CpuThreads()
"""Of this process."""
