"""Causal attention for scattered rows: each row sees exactly the keys at or before its position.

Rows are taken in blocks; a block looks only at keys up to its last row, so scattered rows cost what
the causal triangle costs, not the whole rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 128


@dataclass
class RowAttention:
    """Attention of the same rows in every layer of a pass; masks are built once and reused.

    rows: (rows,) int64, positions in rising order. dtype: of queries and keys.
    """

    rows: Tensor
    dtype: torch.dtype
    _masks: dict[int | None, list[tuple[int, int, int, Tensor]]] = field(default_factory=dict)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return (batch, rows, heads, head_dim).

        query: (batch, heads, rows, head_dim). keys, values: (batch, kv_heads, tokens, head_dim),
        index = position; every position up to the last row must hold finite values.
        """
        batch, heads, rows, _ = query.shape
        out = query.new_empty(batch, rows, heads, values.shape[-1])
        for start, end, seen, mask in self._blocks(window):
            part = query[:, :, start:end], keys[:, :, :seen], values[:, :, :seen]
            if softcap is None:
                done = F.scaled_dot_product_attention(
                    *part, attn_mask=mask, scale=scaling, enable_gqa=True
                )
            else:
                done = _softcapped(*part, mask=mask, scaling=scaling, softcap=softcap)
            out[:, start:end] = done.transpose(1, 2)
        return out

    def _blocks(self, window: int | None) -> list[tuple[int, int, int, Tensor]]:
        """(first row, past last row, keys seen, additive mask (rows, keys)) of each block."""
        if window not in self._masks:
            self._masks[window] = [
                self._block(start, min(start + BLOCK_ROWS, self.rows.numel()), window)
                for start in range(0, self.rows.numel(), BLOCK_ROWS)
            ]
        return self._masks[window]

    def _block(self, start: int, end: int, window: int | None) -> tuple[int, int, int, Tensor]:
        seen = int(self.rows[end - 1]) + 1
        hidden = _hidden(self.rows[start:end], seen, window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.rows.device)
        return start, end, seen, mask.masked_fill_(hidden, float("-inf"))


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scaling: float, softcap: float
) -> Tensor:
    """Attention with capped logits, which PyTorch's fused attention cannot do."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
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
    hidden = _hidden(rows, keys.shape[2], window)
    shares: Tensor = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
    return shares.flatten(0, 1)


def _hidden(rows: Tensor, tokens: int, window: int | None) -> Tensor:
    """(rows, tokens) bool: keys a row must not see, later ones and those outside its window."""
    keys = torch.arange(tokens, device=rows.device)[None]
    hidden = keys > rows[:, None]
    if window is not None:
        hidden |= keys <= rows[:, None] - window
    return hidden
