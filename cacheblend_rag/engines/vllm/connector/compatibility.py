"""Checks for vLLM features that cannot be combined with blending, and vLLM's KV cache groups.

Layers of a group share a block table. If a model mixes full attention and sliding windows, vLLM's
hybrid KV cache manager puts its layers into several groups. A group of layers with a window gets no
blocks for tokens before the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

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


FAILS_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether failed asynchronous loads are reported to vLLM by request (0.30 on), not by block."""


def layers_by_spec(group: Any) -> dict[Any, list[str]]:
    """Return the names of a group's layers by their KV cache spec.

    Specs differ if only some layers are kept in fewer bits (--kv-cache-dtype-skip-layers).
    """
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return {spec: list(group.layer_names)}
    found: dict[Any, list[str]] = {}
    for name in group.layer_names:
        found.setdefault(spec.kv_cache_specs[name], []).append(name)
    return found


def obstacle(kv_cache_config: Any, cache_config: Any) -> str | None:
    """Return why a model with several KV cache groups cannot be blended, or None.

    With one group nothing is refused here: `Trial` tests the model.
    """
    if len(kv_cache_config.kv_cache_groups) <= 1:
        return None
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layers_by_spec(group)]
    size = cache_config.block_size
    hashed = getattr(cache_config, "prefix_match_unit", None)  # vLLM 0.31 has none
    if any(type(spec) not in {FullAttentionSpec, SlidingWindowSpec} for spec in specs):
        return "KV cache groups of other kinds than full attention and sliding windows"
    if any(spec.block_size != size for spec in specs) or hashed not in {None, size}:
        return "KV cache groups with blocks of different sizes"
    return None


def kept_tokens(kv_cache_config: Any, block_size: int) -> int | None:
    """Return the length of the longest prompt part that has all blocks in all groups; None is any.

    vLLM drops the complete blocks before the window of the token after that part.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layers_by_spec(group)]
    windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    return min(windows) - 1 + block_size - 1 if windows else None
