"""Lets a Hugging Face model's own forward attend by `attend_by_matmul`, on CPUs with AVX-512.

It is a registered attention implementation: whole prompts without a mask, as in ordinary prefill,
attend by matrix products, and everything else as the library's "sdpa" does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cacheblend_rag.blend.matmul_attention import attend_by_matmul, prefers_matmul
from cacheblend_rag.blend.onednn import has_fast_matmul
from cacheblend_rag.blend.rows import Rows

MATMUL = "cacheblend_rag_matmul"
SDPA = "sdpa"
UNUSUAL = ("position_bias", "s_aux", "softcap", "cache")
"""Options with which the library's own function attends."""
LEAST_TOKENS = 64
"""Shorter prompts attend by PyTorch's own attention: there is little to gain."""


def use_matmul_attention(model: PreTrainedModel) -> bool:
    """Have a model attend by matrix products where they are faster; return whether it does now.

    That is on a CPU with AVX-512, and if it attends by "sdpa".
    """
    is_plain = model.device.type == "cpu" and model.config._attn_implementation == SDPA
    if is_plain and has_fast_matmul():
        model.set_attn_implementation(MATMUL)
    return uses_matmul_attention(model)


def uses_matmul_attention(model: PreTrainedModel) -> bool:
    """Whether a model's own forward attends by matrix products."""
    return bool(model.config._attn_implementation == MATMUL)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered attention function; arguments as for the library's own."""
    is_whole = query.shape[0] == 1 and LEAST_TOKENS <= query.shape[2] == key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = causal and not dropout and all(options.get(name) is None for name in UNUSUAL)
    if attention_mask is None and is_whole and is_plain and _can_matmul(query, key, value):
        every = Rows.at(np.arange(query.shape[2]), query.device)
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        return attend_by_matmul(query, key, value, every, scaling=scaling), None
    done: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
        is_causal=is_causal, **options,
    )  # fmt: skip
    return done


def _can_matmul(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether keys and values have one width, and no gradients are needed."""
    needs_gradient = any(part.requires_grad for part in (query, key, value))
    is_trained = torch.is_grad_enabled() and needs_gradient
    return prefers_matmul(query) and key.shape == value.shape and not is_trained


AttentionInterface.register(MATMUL, _attend)
AttentionMaskInterface.register(MATMUL, sdpa_mask)
