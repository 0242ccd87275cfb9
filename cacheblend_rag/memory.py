"""Recognizes out-of-memory errors, and frees unused memory."""

from __future__ import annotations

import ctypes
import errno
import gc
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from cacheblend_rag.reason import Miss, Reason, ReasonCode

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",
)
"""Messages of allocators without an error class: CPU, MPS, pinned memory, cuBLAS."""
_LONGEST = 200

Need = TypeVar("Need")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lack:
    """The end of work that ran out of memory; why: one line about it."""

    why: str


def lack_of_memory(error: BaseException) -> str | None:
    """Return an out-of-memory error's message in one line; None for any other error."""
    import torch  # here, so that a command that needs no model does not wait for it

    line = (str(error).splitlines() or [""])[0].strip()[:_LONGEST]
    is_enomem = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if is_enomem or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return line or "out of memory"
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return line if any(sign in said for sign in _SIGNS) else None


def no_room(lack: str) -> Reason:
    """Return the reason of a prompt for which there was no memory; lack: one line about it."""
    return Reason(ReasonCode.NO_ROOM, f"{Miss.NO_ROOM}: {lack}")


def give_back_unused() -> None:
    """Collect garbage, and free memory that is cached by PyTorch or by the C library's heap.

    An error's traceback keeps its frames alive, and the tensors in them: call this after the error
    was handled.
    """
    import torch

    gc.collect()
    if trim := getattr(ctypes.pythonapi, "malloc_trim", None):
        trim(0)
    if not torch.accelerator.is_available():
        return
    empty = getattr(torch.accelerator, "empty_cache", torch.cuda.empty_cache)  # of PyTorch 2.9
    empty()
    if empty_host := getattr(torch.accelerator, "empty_host_cache", None):  # of a later one
        empty_host()


def unless_lacking(work: Generator[Need, None, Result]) -> Generator[Need, None, Result | Lack]:
    """Do work; if it runs out of memory it is abandoned, and all that it held is freed."""
    try:
        return (yield from work)
    except Exception as error:
        why = lack_of_memory(error)
        if why is None:
            raise
    # After the handler: the error's traceback kept what the work held.
    give_back_unused()
    return Lack(why)
