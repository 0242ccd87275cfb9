"""How long lookups take in a tier that holds few chunks, and in one that holds many.

Both are filled with tiny chunks and asked in turn for the same ones. A disk's files are written as
its tier lays them out, before it is opened: its puts, one lock each, would take minutes. Filling an
S3 endpoint takes many, so it is asked for by name only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli import output
from cacheblend_rag.errors import ConfigError, EngineUnavailableError, StoreError
from cacheblend_rag.kv import ChunkKV, KVKey, TieredKVStore, chunk_id, codec, fingerprint
from cacheblend_rag.kv.lookup import Lookup
from cacheblend_rag.kv.tiers.disk import file_of
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings.tier_url import TierUrl
from tests.benchmarks.command import benchmark_app
from tests.local_servers import own_redis, own_s3

USUAL_TIERS = ("host", "disk", "redis")
TIERS = (*USUAL_TIERS, "s3")
MODEL = fingerprint({"model": "bench"})
Ask = Callable[[TieredKVStore, KVKey], object]


@dataclass(frozen=True)
class LookupPlan(Plan):
    """How long it takes to find, miss and read one chunk among few and among many.

    In memory, on disk and in a Redis started here; filling them takes minutes.
    """

    few: int = option(1000, "Chunks in the smaller tier.", least=1)
    many: int = option(100_000, "Chunks in the larger one.", least=1)
    asked: int = option(100, "Chunks asked for a turn.", least=1)
    repeat: int = option(5, "PriorityLock; medians are shown.", least=1)
    tiers: tuple[str, ...] = option(
        USUAL_TIERS,
        "host, disk, redis or s3 (servers started here); repeatable. Filling S3 takes many "
        "minutes.",
        flag="--tier",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for tier in self.tiers:
            if tier not in TIERS:
                raise ConfigError(f"tier={tier!r} must be one of {', '.join(TIERS)}")
        if not 0 < self.asked <= self.few <= self.many:
            raise ConfigError("asked, few and many must be above 0 and rise in this order")


def measure_lookups(plan: LookupPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``lookups``, median microseconds by tier and size, and the ``ratios`` of sizes.

    find: whether it is stored. miss: a read of what is not. open: a read of what is.
    """
    lookups, ratios, left_out = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for name in plan.tiers:
        try:
            found = _measure(name, plan, advance)
        except EngineUnavailableError as error:
            left_out.append(f"{name}: {error}")
            continue
        few, many = found[plan.few], found[plan.many]
        ratios.append({"tier": name, **{kind: many[kind] / few[kind] for kind in few}})
        lookups += [
            {"tier": name, "stored": stored, **_microseconds(seconds)}
            for stored, seconds in found.items()
        ]
    return {"lookups": lookups, "ratios": ratios, "left_out": left_out}


def _microseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{kind}_microseconds": 1e6 * taken for kind, taken in seconds.items()}


def _measure(name: str, plan: LookupPlan, advance: Advance) -> dict[int, dict[str, float]]:
    """Return median seconds by what is stored and by kind of question."""
    with ExitStack() as stack:
        stores = {
            stored: _filled(TierUrl(_place(name, stack)), stored, stack, advance)
            for stored in dict.fromkeys((plan.few, plan.many))
        }
        cases = {
            (stored, kind): partial(_time, store, ask, keys)
            for stored, store in stores.items()
            for kind, (ask, keys) in _questions(plan).items()
        }
        runs = run_in_turns(
            {f"{name}, {kind}, {stored:,} stored": case for (stored, kind), case in cases.items()},
            plan.repeat,
            advance,
        )
    taken = dict(zip(cases, map(median, runs.values()), strict=True))
    return {stored: {kind: taken[stored, kind] for kind in _questions(plan)} for stored in stores}


def _questions(plan: LookupPlan) -> dict[str, tuple[Ask, Sequence[KVKey]]]:
    step = plan.few // plan.asked
    there = [_key(number * step) for number in range(plan.asked)]
    missing = [_key(plan.many + number) for number in range(plan.asked)]
    return {
        "find": (TieredKVStore.contains, there),
        "miss": (TieredKVStore.get, missing),
        "open": (TieredKVStore.get, there),
    }


def _time(store: TieredKVStore, ask: Ask, keys: Sequence[KVKey], _turn: int) -> float:
    """Return the median seconds of a question; raises StoreError where one is not answered."""
    seconds = []
    for key in keys:
        started = time.perf_counter()
        found = ask(store, key)
        seconds.append(time.perf_counter() - started)
        if isinstance(found, Lookup) and found.reason not in (None, "not stored"):
            raise StoreError("a lookup failed; see the log")
    return median(seconds)


def _place(name: str, stack: ExitStack) -> str:
    """Return the URL of an empty tier."""
    if name == "disk":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
        return f"disk://{folder}"
    if name == "redis":
        return own_redis(stack)
    if name == "s3":
        return own_s3(stack)
    return "host://?capacity=none"


def _filled(url: TierUrl, stored: int, stack: ExitStack, advance: Advance) -> TieredKVStore:
    advance(f"{url.name}: storing {stored:,} chunks")
    if url.scheme == "disk":
        _write_files(Path(url.path), stored)
    tier = open_tier(url, "cpu")
    store = stack.enter_context(TieredKVStore([tier]))
    for number in range(0 if url.scheme == "disk" else stored):
        if not store.put(_key(number), _chunk()):
            raise StoreError(f"the {tier.name} tier does not take a chunk; see the log")
    if tier.usage().entries != stored:
        raise StoreError(f"the {tier.name} tier does not hold {stored:,} chunks; see the log")
    return store


def _write_files(folder: Path, stored: int) -> None:
    kv = _chunk()
    for number in range(stored):
        key = _key(number)
        path = Path(file_of(folder, key))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(codec.encode(key, kv))


def _chunk() -> ChunkKV:
    kv = torch.zeros(2, 2, 1, 4, 8)
    return ChunkKV(kv[:, 0], kv[:, 1], position=0)


def _key(number: int) -> KVKey:
    return KVKey(chunk_id([number]), MODEL)


def show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="microseconds a chunk")
    table.add_column("tier")
    for heading in ("stored", "find", "miss", "open"):
        table.add_column(heading, justify="right")
    for row in found["lookups"]:
        times = [f"{row[f'{kind}_microseconds']:.0f}" for kind in ("find", "miss", "open")]
        table.add_row(row["tier"], f"{row['stored']:,}", *times)
    output.result_console().print(table)


app = benchmark_app(LookupPlan, measure_lookups, show)

if __name__ == "__main__":
    app()
