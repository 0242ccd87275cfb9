"""Copies chunk KV out of larger buffers, so that memory tiers do not keep those alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from cacheblend_rag.kv.packed_kv import StoredKV

SLACK_BYTES = 1 << 16
"""Slack for a chunk read from bytes: views of one buffer that also holds the header."""


def compact(kv: StoredKV, device: torch.device | str = "cpu") -> StoredKV:
    """Return ``kv`` on a device, copied if its storage is larger than the chunk itself."""
    used = Counter[int]()

    def note(tensor: Tensor) -> Tensor:
        used[tensor.untyped_storage().data_ptr()] += tensor.nbytes
        return tensor

    kv.mapped(note)
    return kv.mapped(partial(_own, device=device, used=used))


def _own(tensor: Tensor, *, device: torch.device | str, used: Mapping[int, int]) -> Tensor:
    """used: bytes of the chunk's tensors in each storage, by its address."""
    storage, tensor = tensor.untyped_storage(), tensor.detach().to(device)
    fits = storage.nbytes() <= used[storage.data_ptr()] + SLACK_BYTES
    if fits and tensor[0].is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
