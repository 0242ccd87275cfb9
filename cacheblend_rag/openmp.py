"""Limits which threads of a process have OpenMP thread pools, for PyTorch's CPU operations.

Each thread that runs a parallel operation gets OpenMP threads of its own, which stay as long as it
does. Once a process has more of them than CPUs, GNU's OpenMP no longer lets them spin between
parallel operations: each of a blend's thousands then wakes sleeping threads. After chunks were read
from disk by several threads, or from a second thread of a server on, blends at a ratio of .05 took
1.3 times as long in all threads. So threads that only move chunks use themselves alone, and those
that run a model end their OpenMP threads when they have finished.
"""

from __future__ import annotations

import os
from contextlib import suppress
from ctypes import CDLL
from functools import cache
from pathlib import Path

MAPS = Path("/proc/self/maps")
LIBRARY = "libgomp"
"""File name of GNU's OpenMP runtime, which PyTorch's wheels for Linux include."""
_PROCESS = os.getpid()
SOFT = 1
"""``omp_pause_soft``, an argument of ``omp_pause_resource_all``: frees the thread pool, but keeps
settings such as the number of threads."""


def end_openmp_threads() -> None:
    """Free the calling thread's OpenMP thread pool. Not to be called in a parallel region.

    Its next parallel operation starts new ones, which takes about 60 microseconds with two CPUs.
    Does nothing where PyTorch does not use GNU's OpenMP, on systems other than Linux, and in a
    forked process, whose parent's threads do not exist there.
    """
    if os.getpid() != _PROCESS:
        return
    for library in _libraries():
        library.omp_pause_resource_all(SOFT)


def use_one_thread() -> None:
    """Set the calling thread's number of intra-op threads to one, for as long as it lives.

    Unlike ``torch.set_num_threads``, which new threads of the process would take over.
    Does nothing where PyTorch does not use GNU's OpenMP, and on systems other than Linux.
    """
    import torch  # here, so that a command that needs no model does not wait for it

    torch.get_num_threads()  # PyTorch sets a thread's number when it is first asked
    for library in _libraries():
        library.omp_set_num_threads(1)


@cache
def _libraries() -> tuple[CDLL, ...]:
    """Return the loaded GNU OpenMP libraries that have ``omp_pause_resource_all`` (OpenMP 5.0).

    There may be several: packages bring their own.
    """
    try:
        lines = MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ()
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if LIBRARY in line}
    found: list[CDLL] = []
    for path in sorted(paths):
        if path.name.startswith(LIBRARY):
            with suppress(OSError):  # its file may be gone, or be no library
                found.append(CDLL(str(path)))
    return tuple(library for library in found if hasattr(library, "omp_pause_resource_all"))
