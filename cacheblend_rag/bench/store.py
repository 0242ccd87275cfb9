"""Measures the speed of writing and reading chunk KV in each tier."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from cacheblend_rag.bench.workload import Advance, run_in_turns
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV, HostTier, KVKey, TieredKVStore, chunk_id, fingerprint
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings.tier_url import TierUrl

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Those of Llama 3.1 8B: 128 KiB per token in bfloat16."""
TOKENS_A_MIB = 8
CHUNK_MIB = 64
GIB = 1 << 30
KEY = KVKey(chunk_id([1]), fingerprint({"model": "bench"}))


def measure_store(
    tiers: Sequence[str], repeat: int, advance: Advance = lambda _: None
) -> dict[str, Any]:
    """Return each tier's median speeds with a chunk of 64 MiB, in GiB per second.

    ``disk`` uses a temporary folder. Raises ConfigError for what is no tier, StoreError for one
    that does not take the chunk, or loses it.
    """
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder:
        own = {"host": "host://?capacity=none", "disk": f"disk://{folder}"}
        urls = [TierUrl(own.get(tier, tier)) for tier in dict.fromkeys(tiers)]
        rows = [{"tier": url.name, **_measure(url, repeat, advance)} for url in urls]
    return {"chunk_mib": CHUNK_MIB, "repeat": repeat, "tiers": rows}


def _measure(url: TierUrl, repeat: int, advance: Advance) -> dict[str, float]:
    tokens = CHUNK_MIB * TOKENS_A_MIB
    # In precompute's memory layout, in which keys and values of a layer are adjacent.
    numbers = torch.randn(LAYERS, 2, KV_HEADS, tokens, HEAD_DIM).to(torch.bfloat16)
    kv, into = ChunkKV(numbers, position=0), torch.zeros_like(numbers)
    tier = open_tier(url, "cpu")
    is_memory = isinstance(tier, HostTier)  # which keeps and returns tensors as they are given

    def put(_: int) -> float:
        store.evict(KEY)
        started = time.perf_counter()
        if not store.put(KEY, kv.mapped(torch.clone) if is_memory else kv):
            raise StoreError(f"the {url.name} tier does not take a chunk; see the log")
        return time.perf_counter() - started

    def get(_: int) -> float:
        started = time.perf_counter()
        found = store.get(KEY).kv
        if found is None:
            raise StoreError(f"the {url.name} tier lost the chunk: give it more room")
        if is_memory:
            into.copy_(found.numbers)
        return time.perf_counter() - started

    with TieredKVStore([tier]) as store:
        put(0)
        try:
            cases = {"put_gib_s": put, "get_gib_s": get}
            runs = run_in_turns(cases, repeat, lambda what: advance(f"{url.name}, {what}"))
        finally:
            store.evict(KEY)
    return {name: kv.nbytes / median(taken) / GIB for name, taken in runs.items()}
