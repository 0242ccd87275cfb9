"""Registers `attend_by_matmul` as an attention implementation of Hugging Face models.

It is selected where it is faster: whole prompts without a mask, as in ordinary prefill,
attend by matrix products, and everything else as the library's "sdpa" does.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cacheblend_rag.blend.matmul_attention import attend_by_matmul, prefers_matmul
from cacheblend_rag.blend.onednn import onednn_is_faster
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.engines.transformers.cpu_threads import cpu_threads
from cacheblend_rag.engines.transformers.interception import ACTIVE, attention_configs

MATMUL = "cacheblend_rag_matmul"
SDPA = "sdpa"
DELEGATED = ("position_bias", "cache")
"""Options that only the library's own function implements."""
NAME_COMPARED = re.compile(r'_attn_implementation\s*(==|!=|in\b|not in\b).*["\']sdpa["\']')
"""In the source of models that do something else for implementations of other names."""


def use_matmul_attention(model: PreTrainedModel) -> bool:
    """Have a model attend by matrix products where they are faster; return whether it does now.

    That is on a CPU where `onednn_is_faster`, and in the parts of it that attend by "sdpa". Left as
    they are: models whose own code compares that name, such as those with sparse attention.
    """
    if model.device.type == "cpu" and onednn_is_faster() and not _compares_name(model):
        for config in attention_configs(model):
            if config[ACTIVE] == SDPA:
                config[ACTIVE] = MATMUL
    return uses_matmul_attention(model)


def _compares_name(model: PreTrainedModel) -> bool:
    """Whether the source of a model compares the name of its attention implementation."""
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (KeyError, OSError, TypeError):  # no source to look at
        return True
    return NAME_COMPARED.search(source) is not None


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
    is_whole = query.shape[2] == key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = causal and not dropout and all(options.get(name) is None for name in DELEGATED)
    if attention_mask is None and is_whole and is_plain and _can_matmul(query, key, value):
        every = Rows.at(np.arange(query.shape[2]), query.device)
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        with cpu_threads.limited():  # thousands of short operations, unlike the rest of a prefill
            return attend_by_matmul(query, key, value, every, scaling=scaling), None
    done: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
        is_causal=is_causal, **options,
    )  # fmt: skip
    return done


def _can_matmul(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_by_matmul` supports them: it needs values as wide as keys, no gradients."""
    needs_gradient = any(part.requires_grad for part in (query, key, value))
    is_traced = torch.compiler.is_compiling() or (torch.is_grad_enabled() and needs_gradient)
    return prefers_matmul(query, query.shape[2]) and key.shape == value.shape and not is_traced


AttentionInterface.register(MATMUL, _attend)
AttentionMaskInterface.register(MATMUL, sdpa_mask)
