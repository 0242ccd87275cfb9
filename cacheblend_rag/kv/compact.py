"""Chunk KV cut loose from whatever it was cut from, to be held for long."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.kv.chunk_kv import ChunkKV

_SLACK_BYTES = 1 << 16
"""A chunk read from bytes is views of one buffer, layer by layer, that holds its header besides."""


def compact(kv: ChunkKV) -> ChunkKV:
    """Return ``kv`` on the CPU, cut loose from any storage larger than the chunk itself."""
    prior = None if kv.prior is None else _own(kv.prior, kv.nbytes)
    return ChunkKV(_own(kv.keys, kv.nbytes), _own(kv.values, kv.nbytes), kv.position, prior)


def _own(tensor: Tensor, chunk_nbytes: int) -> Tensor:
    tensor = tensor.detach().cpu()
    fits = tensor.untyped_storage().nbytes() <= chunk_nbytes + _SLACK_BYTES
    if fits and tensor[0].is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
