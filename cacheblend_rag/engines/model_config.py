"""Reads a model's context window, KV shape and dtype from its config, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.models import resolve

if TYPE_CHECKING:
    import torch

BYTES_OF_PRIOR = 4
UNLIMITED = 1 << 20
"""The context window of a model that does not state one, in tokens."""


def text_config(model: str) -> Any:
    """Return the config of a model's text part; raises ModelLoadError if there is none.

    model: as for models.resolve.
    """
    from transformers import AutoConfig

    source = resolve(model)
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"model={model!r}: its config cannot be read: {error}") from error
    return config.get_text_config()


def context_window_in(config: Any) -> int:
    """Return the context window that a text part's config states, in tokens."""
    stated = getattr(config, "max_position_embeddings", None)
    return int(stated) if stated and stated > 0 else UNLIMITED


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Return a model's layers, KV heads and head size."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers), int(kv_heads), int(head_size)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the size of a token's chunk KV: keys and values in all layers, and its prior."""
    layers, kv_heads, head_size = kv_shape(config)
    return 2 * layers * kv_heads * head_size * dtype.itemsize + BYTES_OF_PRIOR


def served_dtype(config: Any, dtype: str, device: str | None) -> torch.dtype:
    """Return the dtype that a model is run in; "" is the device's default."""
    import torch

    from cacheblend_rag.engines.transformers.loading import pick_device, pick_dtype

    picked = pick_dtype(dtype or None, pick_device(device))
    return picked if isinstance(picked, torch.dtype) else (config.dtype or torch.float32)
