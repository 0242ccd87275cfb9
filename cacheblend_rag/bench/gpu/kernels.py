"""The kernels that are measured: the one place to add another.

``own`` is what a pass runs by itself, whatever it chooses on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from cacheblend_rag.blend.flex import FlexAttention
from cacheblend_rag.blend.passes import Attention
from cacheblend_rag.blend.row_attention import RowAttention, has_kernels
from cacheblend_rag.blend.sdpa_backends import without_cudnn
from cacheblend_rag.blend.stack import AttentionCall

OWN = "own"
ATTENTION: Mapping[str, Callable[[], Attention]] = {
    OWN: RowAttention,
    "own without kernels": partial(RowAttention, kernels=False),
    "flex": FlexAttention,
}
"""Makes an attention for one pass, by name. FlexAttention is measured on CUDA only."""

PaddedAttention = Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention whose every input is on the device, so that a CUDA graph can hold it: a call, keys and
values (1, kv_heads, capacity, head_dim), the rows' positions, (rows,), and a mask of `padded_mask`.
Returns (1, rows, heads, head_dim)."""


def attend_padded(
    call: AttentionCall, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    """Attend over the whole capacity of the buffer, with PyTorch's attention and a mask."""
    heads, width = call.query.shape[1], call.query.shape[3]
    # Heads that share a KV head are rows of it, as in `attend_rows`.
    query = call.query.reshape(1, keys.shape[1], -1, width)
    with without_cudnn():
        done = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=call.scaling
        )
    return done.reshape(1, heads, -1, width).transpose(1, 2)


def attend_by_positions(
    call: AttentionCall, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor
) -> Tensor:
    """Attend by the project's Triton kernel, which needs no mask; on NVIDIA GPUs only."""
    from cacheblend_rag.blend.kernels.scattered import attend_scattered  # Triton: only here

    return attend_scattered(call.query, keys, values, positions, scaling=call.scaling)


PADDED: Mapping[str, PaddedAttention] = {"sdpa": attend_padded}
"""Attentions that a CUDA graph can hold, by name."""


def padded_on(device: torch.device) -> Mapping[str, PaddedAttention]:
    """Return those that a device can run."""
    return {**PADDED, "scattered": attend_by_positions} if has_kernels(device) else PADDED
