"""Checks for vLLM features that cannot be combined with blending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.engines.vllm.connector.kv_groups import obstacle
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import Reason, ReasonCode

KV_TYPES = {"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}


def refusal_of(vllm_config: Any, kv_cache_config: Any) -> Reason | None:
    """Return why nothing is blended under this VllmConfig and KVCacheConfig, or None.

    A test decides whether the model itself can be blended.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    cache = vllm_config.cache_config
    obstacles = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "data parallelism of experts": parallel.data_parallel_size > 1 and model.is_moe,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        f"a KV cache of type {cache.cache_dtype}": cache.cache_dtype not in KV_TYPES,
    }
    if model.use_mla:
        return Reason(
            ReasonCode.UNSUPPORTED_ATTENTION, "multi-head latent attention (MLA) cannot be blended"
        )
    if groups := obstacle(kv_cache_config, cache):
        return Reason(ReasonCode.UNSUPPORTED_ATTENTION, f"{groups} cannot be blended")
    for name, present in obstacles.items():
        if present:
            return Reason(ReasonCode.UNSUPPORTED_SETTING, f"{name} cannot be blended")
    return None


def check_attention(layers: Sequence[Any]) -> None:
    """Raise UnsupportedModelError when attention layers do more than plain causal attention."""
    first = layers[0]
    for layer in layers:
        impl = layer.impl
        obstacles = {
            "a layer that is no causal attention": layer.attn_type != "decoder",
            "layers that share KV": layer.kv_sharing_target_layer_name is not None,
            "ALiBi positions": getattr(impl, "alibi_slopes", None) is not None,
            "layers of different shapes": _shape(layer) != _shape(first),
            "values and keys of different widths": layer.head_size_v != layer.head_size,
        }
        for name, present in obstacles.items():
            if present:
                raise UnsupportedModelError(
                    f"{name} cannot be blended", ReasonCode.UNSUPPORTED_ATTENTION
                )


def check_weights(layers: Sequence[Any]) -> None:
    """Raise UnsupportedModelError when decoder layers have weights only while vLLM runs them.

    vLLM then replaces each layer's ``forward`` by a function that loads them.
    """
    if any("forward" in vars(layer) for layer in layers):
        raise UnsupportedModelError(
            "offloaded weights cannot be blended: vLLM loads them by a function around a layer "
            "(--offload-group-size, --cpu-offload-gb without UVA)",
            ReasonCode.UNSUPPORTED_SETTING,
        )


def _shape(layer: Any) -> tuple[int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.head_size
