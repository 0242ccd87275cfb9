"""vLLM's KV cache groups: layers that share a block table, and which blocks a group drops.

If a model mixes full attention and sliding windows, vLLM's hybrid KV cache manager puts its layers
into several groups. A group of layers with a window gets no blocks for tokens before the window.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

FAILS_REQUESTS = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether failed asynchronous loads are reported to vLLM by request (0.30 on), not by block."""


def specs_of(group: Any) -> list[Any]:
    """Return the KV cache specs of a group's layers; one stands for all if they are equal."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


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
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group)]
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
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group)]
    windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    return min(windows) - 1 + block_size - 1 if windows else None
