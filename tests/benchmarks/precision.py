"""What storing chunk KV in a byte a number costs and saves."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, get_args

import torch

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.plan import ModelPlan, option
from cacheblend_rag.cli import output
from cacheblend_rag.kv import ChunkKV, DiskTier, KVKey, StoredChunk, chunk_id, fingerprint
from cacheblend_rag.kv.packed_kv import packed, unpacked
from cacheblend_rag.settings import Precision
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.demo_kv import demo_kv

KEY = KVKey(chunk_id([1]), fingerprint({"model": "bench"}))


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan(ModelPlan):
    """Bytes, time and error of chunk KV stored as computed, as fp8 and as int8.

    Bytes and time are of one chunk of the shape on disk, the error is that of the bundled model's
    KV. What it does to answers is told by `eval --store precision=fp8`.
    """

    shape: str = option("llama-3.1-8b", "A name of the shapes in cacheblend_rag.bench.")
    dtype: str = option("bfloat16", "float32, bfloat16 or float16.")
    chunk_tokens: int = option(512, "Tokens a chunk.", least=1)
    questions: int = option(5, "Demo questions whose chunks' KV is rounded.", least=1)
    repeat: int = option(5, "Timed runs each; medians are shown.", least=1)


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


def measure_precision(plan: PrecisionPlan, advance: Advance) -> dict[str, Any]:
    """Return a row a precision."""
    rows = [asdict(row) for row in measure_rows(plan, advance)]
    return {"shape": plan.shape, "chunk_tokens": plan.chunk_tokens, "rows": rows}


def measure_rows(plan: PrecisionPlan, advance: Advance) -> list[PrecisionRow]:
    """Store one chunk in each precision in turn, on disk, and read it again."""
    kv, sample = _random_chunk(plan), demo_kv(plan.questions)
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
        stored = {name: unpacked(packed(sample, name)) for name in names}
        return [
            PrecisionRow(
                precision=name,
                bytes_per_token=tiers[name].usage().nbytes / plan.chunk_tokens,
                put_seconds=statistics.median(seconds[f"put {name}"]),
                load_seconds=statistics.median(seconds[f"load {name}"]),
                keys_error=_error(sample.keys, stored[name].keys),
                values_error=_error(sample.values, stored[name].values),
            )
            for name in names
        ]


def _random_chunk(plan: PrecisionPlan) -> ChunkKV:
    shape = plan.model_shape
    geometry = (shape.layers, shape.kv_heads, plan.chunk_tokens, shape.hidden // shape.heads)
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(geometry, generator=draw).to(plan.torch_dtype) for _ in range(2))
    return ChunkKV(keys, values, 0)


def _error(exact: torch.Tensor, near: torch.Tensor) -> float:
    exact, near = exact.double(), near.double()
    return float((exact - near).norm() / exact.norm())


def show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        output.print_facts(f"{row.pop('precision')}, {found['shape']}", row)


app = benchmark_app(PrecisionPlan, measure_precision, show)

if __name__ == "__main__":
    app()
