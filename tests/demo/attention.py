"""Attention while training: many questions on one context, hidden from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

if TYPE_CHECKING:
    from tests.demo.batches import Batch

ATTENTION = "cacheblend_demo_training"

HIDDEN = -1e4
BLOCK = 256


def split_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    batch: Batch,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a batch: the context to itself, each question to the context and to itself."""
    dtype, groups, n = value.dtype, query.shape[1] // key.shape[1], batch.context_length
    query = (query * scaling).to(dtype)
    key = key.to(dtype).repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    bias, window = batch.context_bias, sliding_window or query.shape[2]
    out = [_attend_context(query[:, :, :n], key[:, :, :n], value[:, :, :n], bias, window)]
    if query.shape[2] > n:
        out.append(_attend_questions(query[:, :, n:], key, value, batch, window))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def _attend_context(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, window: int) -> Tensor:
    """In blocks of queries, so that most of what is hidden anyway is never computed."""
    blocks = []
    for start in range(0, query.shape[2], BLOCK):
        stop = min(start + BLOCK, query.shape[2])
        first = max(0, start - window + 1)
        scores = query[:, :, start:stop] @ key[:, :, first:stop].transpose(-1, -2)
        scores = scores + bias[:, :, start:stop, first:stop]
        distance = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
        weights = scores.masked_fill(distance >= window, HIDDEN).softmax(-1)
        blocks.append(weights @ value[:, :, first:stop])
    return torch.cat(blocks, 2)


def _attend_questions(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, window: int
) -> Tensor:
    """Questions are shorter than any window, so that a window hides context from them only."""
    n, length = batch.context_length, batch.question_length
    size, heads, rows, width = query.shape
    split = (size, heads, rows // length, length, width)
    distance = batch.positions[:, None, n:, None] - torch.arange(n)
    context = query @ key[:, :, :n].transpose(-1, -2) + batch.padding_bias
    context = context.masked_fill(distance >= window, HIDDEN)
    own_key, own_value = key[:, :, n:].reshape(split), value[:, :, n:].reshape(split)
    own = query.reshape(split) @ own_key.transpose(-1, -2) + causal_bias(length, query.dtype)
    weights = torch.cat([context, own.reshape(size, heads, rows, length)], -1).softmax(-1)
    own_weights = weights[..., n:].reshape(*split[:-1], length)
    return weights[..., :n] @ value[:, :, :n] + (own_weights @ own_value).reshape(query.shape)


def causal_bias(length: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores (query, key), so that no token sees a later one."""
    return torch.full((length, length), HIDDEN, dtype=dtype).triu(1)


AttentionInterface.register(ATTENTION, split_attention)
