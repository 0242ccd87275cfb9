"""Computes the prior of a chunk's tokens: how much the chunk's document changes their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass, FusedKV
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.question_probe import REUSE_ONLY
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.blend.stack import DecoderStack
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.blend.token_tensor import token_tensor

PRIOR_LAYER = 1
"""The first layer whose keys depend on other tokens: comparing there costs about one layer."""


def prior_layer(stack: DecoderStack) -> int:
    """Return PRIOR_LAYER, or the only layer of a one-layer model."""
    return min(PRIOR_LAYER, stack.geometry.layers - 1)


def keys_of_prior_layer(stack: DecoderStack, tokens: Sequence[int]) -> Steps[Tensor]:
    """Return the keys (kv_heads, tokens, head_dim) of PRIOR_LAYER, running only earlier layers.

    tokens: the whole sequence from position 0. Yields after each block of rows.
    """
    ids = token_tensor(tokens, stack.geometry.device)
    layers = prior_layer(stack) + 1
    fused = FusedKV(replace(stack.geometry, layers=layers), ids.numel())
    nothing = Candidates.none(ids.numel())
    run = BlendPass(stack, ids, fused, nothing, REUSE_ONLY, needs_hidden=False, layers=layers)
    yield from run.steps()
    return fused.keys[-1]


def context_deviation(stack: DecoderStack, alone: Tensor, contextual: Tensor, by: int) -> Tensor:
    """Return the prior, (tokens,) float32: how much a chunk's document changes its keys.

    It is the squared change of a token's key over the chunk's mean squared length of a key, so that
    it can be compared between models: 1 is a change as large as a key.
    alone, contextual: keys (kv_heads, tokens, head_dim) of PRIOR_LAYER, computed after the lead-in
    only and in the document. by: offset of the chunk's position in the document.
    """
    moved = rotated(alone[None], stack.rotation(by).of(prior_layer(stack)))[0]
    change = stack.all_reduce((moved.float() - contextual.float()).square().sum((0, 2)), "sum")
    length = stack.all_reduce(contextual.float().square().sum((0, 2)), "sum").mean()
    return change / length.clamp_min(torch.finfo(torch.float32).tiny)
