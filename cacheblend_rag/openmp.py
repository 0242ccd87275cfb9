"""Keeps threads that run no model from having OpenMP thread pools, for PyTorch's CPU operations.

Each thread that runs a parallel operation gets OpenMP threads of its own, which stay as long as it
does. Once a process has more of them than CPUs, GNU's OpenMP no longer lets them spin between
parallel operations: each of a blend's thousands then wakes sleeping threads. After chunks were read
from disk by several threads, blends at a ratio of .05 took 1.3 times as long; after another thread
than the model's had loaded it, 1.16 times.
"""

from __future__ import annotations

import os
from contextlib import suppress
from ctypes import PyDLL
from functools import cache
from pathlib import Path

MAPS = Path("/proc/self/maps")
LIBRARY = "libgomp"
"""File name of GNU's OpenMP runtime, which PyTorch's wheels for Linux include."""
_PROCESS = os.getpid()
_SOFT = 1
"""``omp_pause_soft``: frees a thread pool, and keeps settings such as the number of threads."""


def use_one_thread() -> None:
    """Set the calling thread's number of intra-op threads to one, for as long as it lives.

    Unlike ``torch.set_num_threads``, which new threads of the process would take over.
    Does nothing where PyTorch does not use GNU's OpenMP, and on systems other than Linux.
    """
    import torch  # here, so that a command that needs no model does not wait for it

    torch.get_num_threads()  # PyTorch sets a thread's number when it is first asked
    for library in _libraries():
        library.omp_set_num_threads(1)


def end_openmp_threads() -> None:
    """Free the calling thread's OpenMP thread pool; its next parallel operation starts another one.

    Does nothing where PyTorch does not use GNU's OpenMP, on systems other than Linux, and in a
    forked process, where the parent's threads do not exist.
    """
    if os.getpid() == _PROCESS:
        for library in _libraries():
            library.omp_pause_resource_all(_SOFT)


@cache
def _libraries() -> tuple[PyDLL, ...]:
    """Return the loaded GNU OpenMP libraries that can free a thread pool (OpenMP 5.0).

    There may be several: packages bring their own. Calls keep the interpreter lock, since they are
    shorter than it takes to get it back: the prompts of a batch are to arrive together.
    """
    try:
        lines = MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ()
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if LIBRARY in line}
    found: list[PyDLL] = []
    for path in sorted(paths):
        if path.name.startswith(LIBRARY):
            with suppress(OSError):  # its file may be gone, or be no library
                found.append(PyDLL(str(path)))
    return tuple(library for library in found if hasattr(library, "omp_pause_resource_all"))
