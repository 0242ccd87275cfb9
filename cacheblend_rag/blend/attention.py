"""Causal attention for scattered rows: each row sees exactly the keys at or before its position.

Rows are taken in blocks; a block looks only at keys up to its last row, so scattered rows cost what
the causal triangle costs, not the whole rectangle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ROWS = 64
ACCELERATOR_BLOCK_ROWS = 1024


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the rows' attention, (batch, rows, heads, head_dim).

    query: (batch, heads, rows, head_dim). keys, values: (batch, kv_heads, tokens, head_dim), index
    = position; every position up to the last row must hold finite values. rows: (rows,) int64,
    positions in rising order. window: keys a row may see at most, itself included. softcap: logits
    are capped at it, or None.
    """
    batch, heads, count, width = query.shape
    kv_heads = keys.shape[1]
    out = query.new_empty(batch, count, heads, width)
    size = BLOCK_ROWS if rows.device.type == "cpu" else ACCELERATOR_BLOCK_ROWS
    for start in range(0, count, size):
        here = slice(start, min(start + size, count))
        seen = int(rows[here.stop - 1]) + 1
        # Heads that share a KV head are laid out as more rows of it: no KV is repeated, and every
        # backend's fused kernel takes the mask.
        part = (
            query[:, :, here].reshape(batch, kv_heads, -1, width),
            keys[:, :, :seen],
            values[:, :, :seen],
        )
        copies = heads // kv_heads
        mask = _bias(rows[here], seen, window, copies=copies, dtype=query.dtype)
        if softcap is None:
            done = functional.scaled_dot_product_attention(*part, attn_mask=mask, scale=scaling)
        else:
            done = _softcapped(*part, mask=mask, scaling=scaling, softcap=softcap)
        out[:, here] = done.reshape(batch, heads, -1, width).transpose(1, 2)
    return out


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """Attention with capped logits, which PyTorch's fused attention cannot do."""
    logits = softcap * torch.tanh(query @ keys.transpose(2, 3) * scaling / softcap) + mask
    return logits.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def attention_mass(
    query: Tensor,
    keys: Tensor,
    rows: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return how much of each row's attention every key gets: (heads, rows, tokens) float32.

    query: (1, heads, rows, head_dim). keys: (1, kv_heads, tokens, head_dim). rows: (rows,) int64.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    grouped = query[0].float().view(kv_heads, heads // kv_heads, *query.shape[2:])
    logits = grouped @ keys[0].float().transpose(1, 2)[:, None] * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = _visible(rows, keys.shape[2], window)
    shares: Tensor = logits.masked_fill_(~visible, float("-inf")).softmax(-1)
    return shares.flatten(0, 1)


def _bias(
    rows: Tensor, tokens: int, window: int | None, *, copies: int, dtype: torch.dtype
) -> Tensor:
    """(copies x rows, tokens) of ``dtype``: what fused attention adds to logits, 0 or -infinity.

    Without a window every row sees the keys before the first row, so only the rest is compared.
    """
    first = int(rows[0]) if window is None else 0
    bias = torch.zeros(copies, rows.numel(), tokens, dtype=dtype, device=rows.device)
    bias[:, :, first:].masked_fill_(~_visible(rows, tokens, window, first), float("-inf"))
    return bias.flatten(0, 1)


def _visible(rows: Tensor, tokens: int, window: int | None, first: int = 0) -> Tensor:
    """(rows, tokens - first) bool: which keys from ``first`` on a row may see.

    Not later ones, nor those outside its window.
    """
    distance = rows[:, None] - torch.arange(first, tokens, device=rows.device)[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
