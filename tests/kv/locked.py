"""Stands for a device that page-locked memory is for."""

from __future__ import annotations

import mmap

from torch import Tensor

from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.kv.page_locked import PageLockedMemory

PAGE = mmap.PAGESIZE


class Locked:
    """Stands for the device: what is locked, by address. refuses: whether it locks nothing more."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.pages: dict[int, int] = {}
        self.is_there, self.refuses = True, False
        self.memory = PageLockedMemory(
            self.lock, self.pages.pop, lambda: self.is_there, limit
        )  # fmt: skip

    def lock(self, address: int, nbytes: int) -> bool:
        assert address % PAGE == nbytes % PAGE == 0
        if not self.refuses:
            self.pages[address] = nbytes
        return not self.refuses

    def has(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(
            start <= first and first + tensor.nbytes <= start + nbytes
            for start, nbytes in self.pages.items()
        )


def tensors(kv: ChunkKV) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    kv.mapped(note)
    return found
