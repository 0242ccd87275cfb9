"""``bench store`` over memory, disk, and a Redis and an S3 endpoint that are started here."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plans import StorePlan
from cacheblend_rag.bench.store import measure_store
from cacheblend_rag.cli.bench import print_store
from cacheblend_rag.errors import EngineUnavailableError
from tests.benchmarks.command import benchmark_app
from tests.local_servers import own_redis, own_s3


@dataclass(frozen=True, kw_only=True)
class TierPlan(StorePlan):
    """How fast chunk KV goes into each tier and comes out, Redis and S3 among them."""


def measure_tiers(plan: TierPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """As measure_store; ``left_out`` says which servers could not be started, and why."""
    left_out: list[str] = []
    with ExitStack() as stack:
        tiers = list(plan.tiers)
        for name, start in (("redis", own_redis), ("s3", own_s3)):
            advance(f"starting {name}")
            try:
                tiers.append(start(stack))
            except EngineUnavailableError as error:
                left_out.append(f"{name}: {error}")
        return {**measure_store(replace(plan, tiers=tuple(tiers)), advance), "left_out": left_out}


app = benchmark_app(TierPlan, measure_tiers, print_store)

if __name__ == "__main__":
    app()
