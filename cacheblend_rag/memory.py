"""Memory that cannot be had: telling it from other failures, and giving back what is unused."""

from __future__ import annotations

import errno
import gc
from typing import Final

from cacheblend_rag.reason import Reason, ReasonCode

NO_ROOM: Final = "no room"
"""What reports say of a prompt, or of a chunk, for which there was no memory."""
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",
)
"""What allocators say that have no error of their own: CPU, MPS, pinned memory, cuBLAS."""
_LONGEST = 200


def lack_of_memory(error: BaseException) -> str | None:
    """Return one line about memory that could not be had; None for any other error."""
    import torch  # here, so that a command that needs no model does not wait for it

    line = (str(error).splitlines() or [""])[0].strip()[:_LONGEST]
    is_enomem = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if is_enomem or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return line or "out of memory"
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return line if any(sign in said for sign in _SIGNS) else None


def no_room(lack: str) -> Reason:
    """Return the reason of a prompt for which there was no memory; lack: one line about it."""
    return Reason(ReasonCode.NO_ROOM, f"{NO_ROOM}: {lack}")


def give_back_unused() -> None:
    """Collect garbage, and return the memory that PyTorch keeps for later to its device.

    An error's traceback keeps the frames that it went through, and the tensors in them: call this
    where the error is gone.
    """
    import torch

    gc.collect()
    if not torch.accelerator.is_available():
        return
    empty = getattr(torch.accelerator, "empty_cache", torch.cuda.empty_cache)  # of PyTorch 2.9
    empty()
    if empty_host := getattr(torch.accelerator, "empty_host_cache", None):  # of a later one
        empty_host()
