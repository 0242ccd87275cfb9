"""Ends the OpenMP threads of a thread that has finished computing.

Each thread that runs a parallel operation of PyTorch on a CPU gets OpenMP threads of its own, which
stay as long as it does. Once a process has more of them than CPUs, GNU's OpenMP no longer lets them
spin between parallel operations: each of a blend's thousands then wakes sleeping threads. With a
second thread of a server, or of LangChain's ``batch``, blends at a ratio of .05 took 1.3 times as
long in all threads. Ended in time, they are those of one thread, as a rule.
"""

from __future__ import annotations

import os
from ctypes import CDLL
from functools import cache
from pathlib import Path

MAPS = Path("/proc/self/maps")
LIBRARY = "libgomp"
"""GNU's OpenMP library. Others spin as long however many threads there are."""
_PROCESS = os.getpid()
SOFT = 1
"""OpenMP's ``omp_pause_soft``: settings stay as they are, and the next operation starts threads."""


def end_openmp_threads() -> None:
    """End the OpenMP threads of the calling thread, outside of parallel operations.

    Its next parallel operation starts new ones, which takes about 60 microseconds with two CPUs.
    Does nothing where PyTorch does not use GNU's OpenMP, on systems other than Linux, and in a
    forked process, whose parent's threads do not exist there.
    """
    if os.getpid() != _PROCESS:
        return
    for library in _libraries():
        library.omp_pause_resource_all(SOFT)


@cache
def _libraries() -> tuple[CDLL, ...]:
    """Return the loaded OpenMP libraries that can do it, those of OpenMP 5.0 and later.

    There may be several: packages bring their own.
    """
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in lines if LIBRARY in line}
    loaded = [CDLL(path) for path in sorted(paths) if Path(path).is_file()]
    return tuple(library for library in loaded if hasattr(library, "omp_pause_resource_all"))
