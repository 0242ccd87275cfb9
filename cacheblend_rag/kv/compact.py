"""Copies chunk KV out of larger buffers, so that memory tiers do not keep those alive."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cacheblend_rag.kv.packed_kv import StoredKV

SLACK_BYTES = 1 << 16
"""Slack for a chunk read from bytes: views of one buffer that also holds the header."""


def compact(kv: StoredKV, device: torch.device | str = "cpu") -> StoredKV:
    """Return ``kv`` on a device, copied if its storage is larger than the chunk itself."""
    return kv.mapped(partial(_own, device=device, chunk_nbytes=kv.nbytes))


def _own(tensor: Tensor, *, device: torch.device | str, chunk_nbytes: int) -> Tensor:
    tensor = tensor.detach().to(device)
    fits = tensor.untyped_storage().nbytes() <= chunk_nbytes + SLACK_BYTES
    if fits and tensor[0].is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
