"""What vLLM can do that blending cannot: such a server answers by ordinary prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import Reason, ReasonCode

KV_TYPES = {"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}


def refusal_of(vllm_config: Any, kv_cache_config: Any) -> Reason | None:
    """Return why nothing is blended under this VllmConfig and KVCacheConfig, or None.

    Whether the model itself can be blended is found by a trial.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    cache = vllm_config.cache_config
    obstacles = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "data parallelism of experts": parallel.data_parallel_size > 1 and model.is_moe,
        "several KV cache groups": len(kv_cache_config.kv_cache_groups) > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        f"a KV cache of type {cache.cache_dtype}": cache.cache_dtype not in KV_TYPES,
    }
    if model.use_mla:
        return Reason(
            ReasonCode.UNSUPPORTED_ATTENTION, "multi-head latent attention (MLA) cannot be blended"
        )
    for name, present in obstacles.items():
        if present:
            return Reason(ReasonCode.UNSUPPORTED_SETTING, f"{name} cannot be blended")
    return None


def drops_blocks(kv_cache_config: Any) -> bool:
    """Whether vLLM gives no blocks to what lies before the sliding window.

    It recomputes a failed synchronous load in the blocks it has, so a load must not be one.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return any(isinstance(spec, SlidingWindowSpec) for spec in specs)


def check_attention(layers: Sequence[Any]) -> None:
    """Raise UnsupportedModelError when attention layers do more than plain causal attention."""
    first = layers[0]
    for layer in layers:
        impl = layer.impl
        obstacles = {
            "a layer that is no causal attention": layer.attn_type != "decoder",
            "layers that share KV": layer.kv_sharing_target_layer_name is not None,
            "ALiBi positions": getattr(impl, "alibi_slopes", None) is not None,
            "layers of several shapes": _shape(layer) != _shape(first),
            "values of another width than keys": layer.head_size_v != layer.head_size,
        }
        for name, present in obstacles.items():
            if present:
                raise UnsupportedModelError(
                    f"{name} cannot be blended", ReasonCode.UNSUPPORTED_ATTENTION
                )


def _shape(layer: Any) -> tuple[int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.head_size
