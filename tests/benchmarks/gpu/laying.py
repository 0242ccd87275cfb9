"""Step: stored chunks on their way from a tier into the buffer of a pass, per layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.trial import open_stack
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.chunk_loader import ChunkLoader, begin_reading
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.settings import Precision, StoreConfig
from tests.benchmarks.gpu.layer import build_layers
from tests.benchmarks.gpu.scene import Doing, Row, Scene
from tests.benchmarks.gpu.timing import DIGITS, attempt, gigabytes_per_second, times

LAYERS = 4
REAL_CASES = ((8, 512), (16, 512), (32, 512), (64, 256))
TOY_CASES = ((2, 8), (3, 8))
REPEAT = 5
FINGERPRINT = fingerprint({"model": "bench gpu"})
WAYS: tuple[tuple[str, Precision], ...] = (
    ("host", "native"),
    ("host", "fp8"),
    ("device", "native"),
)
"""The tier that holds the chunks, and the precision in which they are stored."""


@torch.no_grad()
def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each number of chunks and way; ``host_ms``: of the model's own thread."""
    doing("building the model")
    stack = open_stack(build_layers(scene, LAYERS))
    for tier, precision in WAYS:
        for chunks, size in scene.pick(REAL_CASES, TOY_CASES):
            doing(f"{chunks} chunks of {size} tokens, {precision}, from {tier}")
            row = {"chunks": chunks, "tokens": chunks * size, "tier": tier, "precision": precision}
            yield attempt(row, partial(_measured, scene, stack, chunks, size, row))


def _measured(scene: Scene, stack: TransformersStack, chunks: int, size: int, row: Row) -> Row:
    config = StoreConfig(tiers=(f"{row['tier']}://?capacity=none",), precision=row["precision"])
    with ExitStack() as open_things:
        store = open_things.enter_context(TieredKVStore.of(config, device=scene.device))
        keys = [KVKey(chunk_id([number]), FINGERPRINT) for number in range(chunks)]
        for key in keys:
            store.put(key, _chunk(stack, size))
        loaders = []
        for _ in range(1 + REPEAT):
            starts = range(0, chunks * size, size)
            placed = [PlacedChunk(key, at, at + size) for key, at in zip(keys, starts, strict=True)]
            source = open_things.enter_context(begin_reading(store, placed, stack))
            loader = ChunkLoader(stack, placed, source)
            run_to_end(loader.find())
            loaders.append(loader.into(FusedKV(stack.geometry, chunks * size)))
        works = [partial(_load, loader) for loader in loaders]
        works[0]()  # buffers are made when first needed
        taken = times(scene.device, works[1:])
        missed = [chunk.reason for loader in loaders for chunk in loader.chunks if chunk.reason]
    if missed:
        return {"failed": f"chunks were missed: {missed[0]}"}
    found = {name: round(value / LAYERS, DIGITS) for name, value in taken.items()}
    nbytes = FusedKV.bytes_for(stack.geometry, chunks * size) // LAYERS
    speed = gigabytes_per_second(nbytes, found["ms"])
    return {**found, "layer_mib": round(nbytes / 2**20, 2), "gb_s": speed}


def _chunk(stack: TransformersStack, size: int) -> ChunkKV:
    """Return a chunk of random KV on the host; keys and values of a layer are adjacent."""
    of = stack.geometry
    kv = torch.randn(of.layers, 2, of.kv_heads, size, of.head_dim).to(of.dtype)
    return ChunkKV(kv, position=0)


def _load(loader: ChunkLoader) -> None:
    """Copy all layers into the buffer, one after the other."""
    for layer in range(LAYERS):
        run_to_end(loader.load(layer))
