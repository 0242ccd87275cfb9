"""Recognizes out-of-memory errors, frees unused memory, and reuses that of large CPU tensors."""

from __future__ import annotations

import errno
import gc
import os
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from cacheblend_rag.reason import Reason, ReasonCode

if TYPE_CHECKING:
    from torch import Tensor

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
_ALIGNMENT = 64
"""Alignment of CPU tensors in bytes, the same as PyTorch's."""


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


class ReusedMemory:
    """Caches the memory block of the last large CPU tensor for the next one.

    A block is reused only once no tensor or view uses it.

    Allocators return large blocks to the system, which then maps and clears each page anew: 46,000
    page faults for the KV of 4,128 tokens in SmolLM2-135M's shape and float32. PyTorch keeps memory
    of accelerators in the same way. ``give_back_unused`` frees it.

    least_bytes: smaller tensors are left to the allocator, which reuses their memory itself.
    most_bytes: a larger block is not kept.
    """

    def __init__(self, least_bytes: int, most_bytes: int) -> None:
        self._least, self._most = least_bytes, most_bytes
        self.after_fork()

    def after_fork(self) -> None:
        """Drop the cached block, and replace the lock, which a parent's thread may have held."""
        self._lock = Lock()
        self._block: Any = None
        self._user: ref[Any] | None = None

    def free(self) -> None:
        """Drop the cached block; tensors that use it keep it alive."""
        with self._lock:
            self._block = None

    def empty(self, nbytes: int) -> Tensor:
        """Return an uninitialized tensor of so many bytes, (nbytes,) uint8, on the CPU.

        Raises MemoryError.
        """
        import numpy as np
        import torch

        if not self._least <= nbytes <= self._most:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            block = self._block
            is_used = self._user is not None and self._user() is not None
            if block is None or is_used or block.nbytes < nbytes + _ALIGNMENT:
                self._block = block = None  # before a larger one is allocated
                self._block = block = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
            start = -block.ctypes.data % _ALIGNMENT
            part = block[start : start + nbytes]
            self._user = ref(part)  # PyTorch's tensors keep this array, and so do their views
            return torch.from_numpy(part)


prompt_memory: Final = ReusedMemory(least_bytes=16 << 20, most_bytes=1 << 30)
"""Of prompts' KV on the CPU."""
os.register_at_fork(after_in_child=prompt_memory.after_fork)


def give_back_unused() -> None:
    """Collect garbage, and free memory that is cached here and by PyTorch.

    An error's traceback keeps its frames alive, and the tensors in them: call this after the error
    was handled.
    """
    import torch

    gc.collect()
    prompt_memory.free()
    if not torch.accelerator.is_available():
        return
    empty = getattr(torch.accelerator, "empty_cache", torch.cuda.empty_cache)  # of PyTorch 2.9
    empty()
    if empty_host := getattr(torch.accelerator, "empty_host_cache", None):  # of a later one
        empty_host()
