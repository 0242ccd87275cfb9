"""Recognizes out-of-memory errors, and frees unused memory."""

from __future__ import annotations

import errno
import gc
from typing import Final

from cacheblend_rag.reason import Reason, ReasonCode

NO_ROOM: Final = "no room"
"""The reason in reports for a prompt, or a chunk, for which there was no memory."""
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",
)
"""Messages of allocators without an error class: CPU, MPS, pinned memory, cuBLAS."""
_LONGEST = 200


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
    return Reason(ReasonCode.NO_ROOM, f"{NO_ROOM}: {lack}")


def give_back_unused() -> None:
    """Collect garbage, and free memory that is cached by PyTorch.

    An error's traceback keeps its frames alive, and the tensors in them: call this after the error
    was handled.
    """
    import torch

    gc.collect()
    if not torch.accelerator.is_available():
        return
    empty = getattr(torch.accelerator, "empty_cache", torch.cuda.empty_cache)  # of PyTorch 2.9
    empty()
    if empty_host := getattr(torch.accelerator, "empty_host_cache", None):  # of a later one
        empty_host()
