"""Measures the speed of writing and reading chunk KV in each tier, and the machine's raw limit.

The raw limit moves as many bytes by the same means and does nothing else: a copy in memory, a file
written and read in one go, SET and GET, HTTP's PUT and GET by the same client.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cacheblend_rag.bench.workload import Advance, run_in_turns
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.kv import (
    ChunkKV,
    DiskTier,
    HostTier,
    KVKey,
    ObjectTier,
    RedisTier,
    Tier,
    TieredKVStore,
    chunk_id,
    fingerprint,
)
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings.tier_url import TierUrl

LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Those of Llama 3.1 8B: 128 KiB per token in bfloat16."""
TOKENS_A_MIB = 8
CHUNK_MIB = 64
GIB = 1 << 30

KEY = KVKey(chunk_id([1]), fingerprint({"model": "bench"}))
Raw = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]
"""How bytes are put, got back and removed by the bare means of a tier."""


def measure_store(
    tiers: Sequence[str], repeat: int, advance: Advance = lambda _: None
) -> dict[str, Any]:
    """Return each tier's median speeds with a chunk of 64 MiB, in GiB per second.

    ``disk`` uses a temporary folder. Raises ConfigError for what is no tier.
    """
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder:
        own = {"host": "host://?capacity=none", "disk": f"disk://{folder}"}
        urls = [TierUrl(own.get(tier, tier)) for tier in dict.fromkeys(tiers)]
        rows = [{"tier": url.name, **_measure(url, repeat, advance)} for url in urls]
    return {"chunk_mib": CHUNK_MIB, "repeat": repeat, "tiers": rows}


def _measure(url: TierUrl, repeat: int, advance: Advance) -> dict[str, float]:
    kv = _chunk(CHUNK_MIB * TOKENS_A_MIB)
    data, into = os.urandom(kv.nbytes), torch.zeros_like(kv.numbers)
    tier = open_tier(url, "cpu")
    is_memory = isinstance(tier, HostTier)
    with TieredKVStore([tier]) as store, _raw(tier, data, into) as (put, get, drop):

        def drop_chunk() -> None:
            store.evict(KEY)

        cases = {
            "put_gib_s": lambda _: _timed(lambda: _put(store, kv, is_memory), before=drop_chunk),
            "get_gib_s": lambda _: _timed(lambda: _get(store, into if is_memory else None)),
            "raw_put_gib_s": lambda _: _timed(put, before=drop),
            "raw_get_gib_s": lambda _: _timed(get),
        }
        put()
        _put(store, kv, is_memory)
        try:
            runs = run_in_turns(cases, repeat, lambda what: advance(f"{url.name}, {what}"))
        finally:
            store.evict(KEY)
    return {name: kv.nbytes / statistics.median(taken) / GIB for name, taken in runs.items()}


def _chunk(tokens: int) -> ChunkKV:
    """Return a chunk in precompute's memory layout: keys and values of a layer are adjacent."""
    kv = torch.randn(LAYERS, 2, KV_HEADS, tokens, HEAD_DIM).to(torch.bfloat16)
    return ChunkKV(kv, position=0)


def _timed(do: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of ``do``; ``before`` removes the object to replace, untimed."""
    before()
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def _put(store: TieredKVStore, kv: ChunkKV, is_memory: bool) -> None:
    """Store the chunk; in memory a copy of it, since the host tier keeps tensors as given."""
    if is_memory:
        kv = kv.mapped(torch.clone)
    if not store.put(KEY, kv):
        raise StoreError(f"the {store.tiers[0].name} tier does not take a chunk; see the log")


def _get(store: TieredKVStore, into: Tensor | None) -> None:
    """Load the chunk; from memory, which returns its own tensors, copy it into a buffer."""
    found = store.get(KEY).kv
    if found is None:
        raise StoreError(f"the {store.tiers[0].name} tier lost the chunk: give it more room")
    if into is not None:
        into.copy_(found.numbers)


@contextmanager
def _raw(tier: Tier, data: bytes, into: Tensor) -> Iterator[Raw]:
    """Yield raw put and get operations of a tier's backend; removes their data at the end."""
    name = f"raw-{os.getpid()}"
    match tier:
        case HostTier():
            source = torch.zeros_like(into)
            yield source.clone, lambda: into.copy_(source), lambda: None
        case DiskTier():
            path = tier.path / name
            drop = partial(path.unlink, missing_ok=True)
            yield partial(path.write_bytes, data), path.read_bytes, drop
            drop()
        case RedisTier(client=client):
            drop = partial(client.delete, name)
            yield partial(client.set, name, data), partial(client.get, name), drop
            drop()
        case ObjectTier(store=store):
            put = partial(store.put, name, data, use_multipart=False)
            drop = partial(store.delete, name)
            yield put, lambda: store.get(name).bytes(), drop
            drop()
        case _:
            raise ConfigError(f"the {tier.name} tier has no raw limit here: give another tier")
