"""What replicas, Redis and S3 hold and carry as a fleet grows: arithmetic on stated assumptions.

``python -m tests.benchmarks.capacity`` prints the tables of docs/fleet.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.bench.shapes import named_shape
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag.planning import PRECISIONS, KVShape
from cacheblend_rag.settings import Precision
from tests.benchmarks.command import benchmark_app

GIB, TIB = 1 << 30, 1 << 40
FLEETS = (1, 10, 100, 1000)
ORIGINS = {
    "shape": "its config.json; KV in 16 bits as computed",
    "precision": "a setting of the store",
    "chunk_tokens": "assumed",
    "chunks": "assumed",
    "host_gib": "`host_bytes`, chosen",
    "copies": "assumed: its prompts have several affinities",
    "requests": "assumed",
    "prompt_chunks": "assumed",
    "memory_share": "assumed",
    "redis_share": "assumed; the rest comes from S3",
    "warm_share": "assumed; `ttl` and Redis' own eviction choose them",
    "redis_gib": "chosen",
    "redis_speed": "[measured](tiers.md#how-fast): one client, two CPU cores",
    "s3_speed": "[measured](tiers.md#how-fast): one client of moto's server, two CPU cores",
}


@dataclass(frozen=True, kw_only=True)
class CapacityPlan(Plan):
    """A corpus, and a fleet that answers questions on it. Nothing is measured."""

    shape: str = option("llama-3.1-8b", "Model.")
    precision: str = option("fp8", "Precision of stored KV.")
    chunk_tokens: int = option(512, "Tokens of a chunk.", least=1)
    chunks: int = option(10_000_000, "Chunks of the corpus.", least=1)
    host_gib: float = option(64.0, "Memory of a replica for chunk KV, in GiB.", least=0)
    copies: float = option(3.0, "Replicas that have a chunk in memory, if any has.", least=1)
    requests: float = option(2.0, "Requests per second of a replica.", least=0)
    prompt_chunks: int = option(8, "Chunks in a prompt.", least=1)
    memory_share: float = option(0.7, "Share of chunks found in the replica's memory.", least=0)
    redis_share: float = option(0.25, "Share of chunks read from Redis.", least=0)
    warm_share: float = option(0.02, "Share of the corpus that Redis is to hold.", least=0)
    redis_gib: float = option(256.0, "Memory of a Redis server, in GiB.", least=1)
    redis_speed: float = option(0.27, "What a Redis server sends, in GiB/s.", least=0.001)
    s3_speed: float = option(0.52, "What a connection to S3 brings, in GiB/s.", least=0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision} must be one of {', '.join(PRECISIONS)}")
        if self.memory_share + self.redis_share > 1:
            raise ConfigError("memory_share and redis_share must be at most 1 together")


def compute_capacity(plan: CapacityPlan, _: Advance = lambda _: None) -> dict[str, object]:
    """Return the assumptions, the size of a chunk and of all, and a row for each size of fleet."""
    shape = named_shape(plan.shape)
    sized = KVShape(shape.layers, shape.kv_heads, shape.hidden // shape.heads, itemsize=2)
    chunk = sized.chunk_bytes(cast(Precision, plan.precision), plan.chunk_tokens)
    held = int(plan.host_gib * GIB) // chunk
    warm = math.ceil(plan.warm_share * plan.chunks)
    rows = []
    for replicas in FLEETS:
        loads = replicas * plan.requests * plan.prompt_chunks
        redis = loads * plan.redis_share * chunk / GIB
        s3 = loads * (1 - plan.memory_share - plan.redis_share) * chunk / GIB
        servers = max(
            math.ceil(warm * chunk / (plan.redis_gib * GIB)), math.ceil(redis / plan.redis_speed)
        )
        rows.append(
            {
                "replicas": replicas,
                "requests_per_second": replicas * plan.requests,
                "in_memory": min(plan.chunks, int(replicas * held / min(plan.copies, replicas))),
                "redis_gib_per_second": redis,
                "redis_servers": servers,
                "s3_gib_per_second": s3,
                "s3_connections": math.ceil(s3 / plan.s3_speed),
            }
        )
    return {
        "assumptions": {name: getattr(plan, name) for name in ORIGINS},
        "chunk_bytes": chunk,
        "corpus_bytes": chunk * plan.chunks,
        "chunks_in_a_replica": held,
        "chunks_in_redis": warm,
        "rows": rows,
    }


def show(told: Mapping[str, Any]) -> None:
    """Print both tables, in Markdown."""
    print(as_markdown(told))


def as_markdown(told: Mapping[str, Any]) -> str:
    """Return both tables, and the sizes between them."""
    helps = {name: one.metadata for name, one in CapacityPlan.__dataclass_fields__.items()}
    lines = ["| assumption | | from |", "| --- | --- | --- |"]
    for name, value in told["assumptions"].items():
        shown = value if isinstance(value, str) else f"{value:,}"
        lines.append(f"| {helps[name]['help'].rstrip('.')} | {shown} | {ORIGINS[name]} |")
    lines += [
        "",
        f"A chunk takes {told['chunk_bytes'] / (1 << 20):.1f} MiB, the corpus "
        f"{told['corpus_bytes'] / TIB:,.0f} TiB. A replica has {told['chunks_in_a_replica']:,} "
        f"chunks in memory, Redis {told['chunks_in_redis']:,}.",
        "",
        "| replicas | requests/s | different chunks in their memory | from Redis, GiB/s "
        "| Redis servers | from S3, GiB/s | connections to S3 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['replicas']:,} | {row['requests_per_second']:,.0f} | {row['in_memory']:,} "
        f"| {row['redis_gib_per_second']:,.1f} | {row['redis_servers']:,} "
        f"| {row['s3_gib_per_second']:,.1f} | {row['s3_connections']:,} |"
        for row in told["rows"]
    ]
    return "\n".join(lines)


app = benchmark_app(CapacityPlan, compute_capacity, show)

if __name__ == "__main__":
    app()
