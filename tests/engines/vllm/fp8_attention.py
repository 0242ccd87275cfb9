"""An attention backend for CPUs with an fp8 KV cache, in PyTorch, for vLLM's registry of backends.

vLLM's own CPU kernel for it needs AVX-512 or AMX. This one computes row by row, so that a row's
result does not depend on how rows are grouped; apart from that it does what any backend does:
keys and values are quantized on their way into the cache, and attention reads them from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

FP8 = torch.float8_e4m3fn


class Fp8Builder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Hands the common metadata on as it is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class Fp8Attention(CPUAttentionBackendImpl):
    """kv_cache: (blocks, kv_heads, block_size, 2 x head_size), keys before values.

    uint8, or the model's dtype in layers that are left out (--kv-cache-dtype-skip-layers).
    """

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size = kv_cache.shape[2]
        kv = torch.cat((key, value), -1)
        kept = kv.to(FP8).view(torch.uint8) if kv_cache.dtype == torch.uint8 else kv
        kv_cache[slot_mapping // size, :, slot_mapping % size] = kept

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata | None,
        output: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        if attn_metadata is None:
            return output
        edges = attn_metadata.query_start_loc.tolist()
        for request, (first, last) in enumerate(pairwise(edges)):
            end = int(attn_metadata.seq_lens[request])
            used = attn_metadata.block_table_tensor[request, : -(-end // kv_cache.shape[2])]
            held = kv_cache[used]
            held = held.view(FP8).float() if held.dtype == torch.uint8 else held
            held = held.transpose(0, 1).flatten(1, 2)
            keys, values = held.chunk(2, -1)
            for row in range(first, last):
                seen = end - (last - 1 - row)
                asked = query[row].view(self.num_kv_heads, -1, self.head_size)
                scores = asked @ keys[:, :seen].transpose(1, 2) * self.scale
                output[row] = (scores.softmax(-1) @ values[:, :seen]).view_as(output[row])
        return output


class QuantizedQuery(Fp8Attention):
    """As kernels on GPUs do: vLLM quantizes the query before it gets here."""

    supports_quant_query_input = True

    def forward(self, layer: Any, query: Tensor, key: Tensor, *others: Any, **named: Any) -> Tensor:
        assert query.dtype == FP8
        plain = query.to(key.dtype) * layer._q_scale
        return super().forward(layer, plain, key, *others, **named)


class Fp8Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Fp8Attention]:
        return Fp8Attention

    @staticmethod
    def get_builder_cls() -> Any:
        return Fp8Builder


class QuantizedQueryBackend(Fp8Backend):
    @staticmethod
    def get_impl_cls() -> type[Fp8Attention]:
        return QuantizedQuery


@contextmanager
def fp8_backend(backend: type[Fp8Backend] = Fp8Backend) -> Iterator[None]:
    """Have vLLM use this backend on CPUs."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{backend.__name__}")
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()
