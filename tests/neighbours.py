"""CPU load by other processes, to benchmark as on a shared machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READY = b"ready\n"
_WORK = """
import os, sys
import numpy as np

parent, numbers = os.getppid(), np.random.default_rng(0).random((384, 384), dtype=np.float32)
print("ready", flush=True)
while os.getppid() == parent:  # also if the parent is killed
    numbers @ numbers
"""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run ``count`` processes that multiply matrices, each on one thread, until the exit."""
    found: list[subprocess.Popen[bytes]] = []
    try:
        while len(found) < count:
            process = subprocess.Popen(
                [sys.executable, "-c", _WORK],
                env={**os.environ, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
            found.append(process)
        for process in found:
            if process.stdout is None or process.stdout.readline() != READY:
                raise RuntimeError("a process that should compute beside the benchmark has ended")
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
