"""What storing chunk KV in a byte a number costs and saves: ``bench precision``."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, get_args

import torch

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.shapes import ModelShape
from cacheblend_rag.config import Precision
from cacheblend_rag.kv import ChunkKV, DiskTier, KVKey, StoredChunk, chunk_id, fingerprint
from cacheblend_rag.kv.packed_kv import packed, unpacked

KEY = KVKey(chunk_id([1]), fingerprint({"model": "bench"}))


@dataclass(frozen=True)
class PrecisionPlan:
    """A chunk of a model's shape, and KV of which the error is measured.

    shape, dtype, chunk_tokens: of the chunk that is stored and loaded. sample: KV that a model has
    computed. repeat: timed runs; medians are told.
    """

    shape: ModelShape
    dtype: torch.dtype
    chunk_tokens: int
    sample: ChunkKV
    repeat: int


@dataclass(frozen=True)
class PrecisionRow:
    """One precision. put_seconds: to round, encode and write a chunk; load_seconds: to read it.

    keys_error, values_error: norm of what rounding changed, as a share of the sample's own norm.
    """

    precision: Precision
    bytes_per_token: float
    put_seconds: float
    load_seconds: float
    keys_error: float
    values_error: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def measure_precision(plan: PrecisionPlan, advance: Advance) -> list[PrecisionRow]:
    """Store one chunk in each precision in turn, on disk, and read it again."""
    kv = _random_chunk(plan)
    names: tuple[Precision, ...] = get_args(Precision)
    with TemporaryDirectory() as folder:
        tiers = {name: DiskTier(Path(folder) / name) for name in names}

        def put(name: Precision) -> float:
            started = perf_counter()
            tiers[name].put(KEY, StoredChunk(packed(kv, name), 0.0))
            return perf_counter() - started

        def load(name: Precision) -> float:
            started = perf_counter()
            found = tiers[name].get(KEY)
            if found is not None:
                unpacked(found.kv)
            return perf_counter() - started

        cases = {f"put {name}": lambda _, name=name: put(name) for name in names}
        cases |= {f"load {name}": lambda _, name=name: load(name) for name in names}
        seconds = run_in_turns(dict(sorted(cases.items(), reverse=True)), plan.repeat, advance)
        stored = {name: unpacked(packed(plan.sample, name)) for name in names}
        return [
            PrecisionRow(
                precision=name,
                bytes_per_token=tiers[name].usage().nbytes / plan.chunk_tokens,
                put_seconds=statistics.median(seconds[f"put {name}"]),
                load_seconds=statistics.median(seconds[f"load {name}"]),
                keys_error=_error(plan.sample.keys, stored[name].keys),
                values_error=_error(plan.sample.values, stored[name].values),
            )
            for name in names
        ]


def _random_chunk(plan: PrecisionPlan) -> ChunkKV:
    shape = plan.shape
    geometry = (shape.layers, shape.kv_heads, plan.chunk_tokens, shape.hidden // shape.heads)
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(geometry, generator=draw).to(plan.dtype) for _ in range(2))
    return ChunkKV(keys, values, 0)


def _error(exact: torch.Tensor, near: torch.Tensor) -> float:
    exact, near = exact.double(), near.double()
    return float((exact - near).norm() / exact.norm())
