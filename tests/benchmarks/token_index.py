"""How long the token index takes to find stored chunks in prompts, ordinary and hostile ones."""

from __future__ import annotations

import random
import resource
import sqlite3
import statistics
import tempfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli import output
from cacheblend_rag.text.token_index import TokenIndex
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.quantiles import p95

SEED = 20260101
VOCABULARY = 49_000
STRIDE = 25
"""Distance of two anchors in a chunk: hostile prompts are made of the windows there."""
SHARED_EVERY = 33
SHARED_TOKENS = 80
REPEATED_EVERY = 1000
LONG = 100_000
MIB = 1 << 20
Prompts = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class TokenIndexPlan(Plan):
    """Time to find chunks in a prompt's tokens; the same plan gives the same tokens.

    Tokens are drawn as unevenly as words are in text. Every 33rd chunk begins with a text that
    these share, every thousandth is a repetition of five tokens.
    """

    chunks: int = option(100_000, "Indexed chunks.", least=20)
    chunk_tokens: int = option(512, "Tokens of each.", least=200)
    prompt_tokens: int = option(4096, "Tokens of a prompt.", least=1000)
    repeat: int = option(50, "Timed runs of each prompt; medians are shown.", least=1)


def measure_token_index(plan: TokenIndexPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return the seconds of opening and adding, MiB, and ``prompts`` with seconds of each kind.

    opening: from rows of SQLite. mib: of the arrays; resident_mib: by which the process grew at
    most. found: share of the prompt's tokens. The last kind is searched while
    a thread adds chunks and merges.
    """
    advance("drawing tokens")
    index = TokenIndex[int]()
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder,
        closing(sqlite3.connect(Path(folder) / "tokens.sqlite")) as database,
    ):
        _save(database, plan)
        prompts = _prompts(plan, database)
        before, started = _resident(), perf_counter()
        advance("opening the index")
        rows = database.execute("SELECT name, tokens FROM chunks ORDER BY name")
        index.add_many((np.frombuffer(blob, np.uint32), name) for name, blob in rows)
        opened, grown = perf_counter() - started, _resident() - before
    found = [
        {"prompt": kind, "tokens": len(tokens), **_timed(index, tokens, plan.repeat)}
        for kind, tokens in prompts.items()
        if advance(kind) is None
    ]
    advance("adding")
    adding, busy = _while_adding(index, plan, prompts["without chunks"])
    return {
        "chunks": plan.chunks,
        "chunk_tokens": plan.chunk_tokens,
        "opening_seconds": opened,
        "mib": index.nbytes / MIB,
        "resident_mib": grown / MIB,
        "add_seconds": adding,
        "prompts": [*found, busy],
    }


def drawn(draw: np.random.Generator, *shape: int) -> NDArray[np.uint32]:
    """Return tokens whose frequency falls with their rank, as that of words does."""
    return ((draw.zipf(1.3, shape) - 1) % VOCABULARY).astype(np.uint32)


def _save(database: sqlite3.Connection, plan: TokenIndexPlan) -> None:
    """Write chunks' tokens to a database."""
    database.execute("CREATE TABLE chunks (name INTEGER PRIMARY KEY, tokens BLOB)")
    draw = np.random.default_rng(SEED)
    shared = drawn(draw, SHARED_TOKENS)
    for name in range(plan.chunks):
        tokens = drawn(draw, plan.chunk_tokens)
        if name % SHARED_EVERY == 0:
            tokens[:SHARED_TOKENS] = shared
        if name % REPEATED_EVERY == 0:
            tokens = np.resize(np.arange(5, dtype=np.uint32), plan.chunk_tokens)
        database.execute("INSERT INTO chunks VALUES (?, ?)", (name, tokens.tobytes()))
    database.commit()


def _read(database: sqlite3.Connection, name: int) -> list[int]:
    (blob,) = database.execute("SELECT tokens FROM chunks WHERE name = ?", (name,)).fetchone()
    tokens: list[int] = np.frombuffer(blob, np.uint32).tolist()
    return tokens


def _prompts(plan: TokenIndexPlan, database: sqlite3.Connection) -> Prompts:
    draw = np.random.default_rng(SEED + 1)
    size = plan.prompt_tokens
    own = [name for name in range(plan.chunks) if name % SHARED_EVERY and name % REPEATED_EVERY]
    few = [_read(database, name) for name in own[:600]]
    windows = [one[at : at + 8] for one in few for at in range(0, len(one) - 40, STRIDE)]
    in_one = len(range(0, plan.chunk_tokens - 40, STRIDE))
    slices = [one[at : at + 33] for one in few for at in range(0, 200 - 33, STRIDE)]
    random.Random(SEED).shuffle(slices)
    gap = drawn(draw, 20).tolist()
    held = [[*_read(database, name), *gap] for name in own[:: len(own) // 20 + 1]]
    plain: list[int] = drawn(draw, LONG).tolist()
    kinds = {
        "one token": [[7]],
        "anchors of one chunk": windows[:in_one],
        "anchors of many chunks": windows,
        "parts of many chunks": slices,
        "a text of many chunks": [_read(database, SHARED_EVERY)[:SHARED_TOKENS], gap],
        "a repetition that is indexed": [list(range(5))],
    }
    hostile = {
        f"{kind}{long}": _repeated(parts, tokens)
        for long, tokens in (("", size), (", long", LONG))
        for kind, parts in kinds.items()
    }
    with_chunks = _repeated(held, size)
    return {
        "without chunks": plain[:size],
        "with chunks": with_chunks,
        "without chunks, long": plain,
        **hostile,
    }


def _repeated(parts: Iterable[list[int]], tokens: int) -> list[int]:
    return list(islice(cycle(chain.from_iterable(parts)), tokens))


def _resident() -> int:
    """Return the most bytes that the process has had resident so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _timed(index: TokenIndex[int], tokens: list[int], repeat: int) -> dict[str, Any]:
    seconds = []
    runs = index.find(tokens)
    for _ in range(repeat):
        started = perf_counter()
        index.find(tokens)
        seconds.append(perf_counter() - started)
    return {
        **_statistics(seconds),
        "found": sum(run.end - run.start for run in runs) / len(tokens),
    }


def _statistics(seconds: list[float]) -> dict[str, float]:
    return {
        "median_seconds": statistics.median(seconds),
        "p95_seconds": p95(seconds),
        "least_seconds": min(seconds),
    }


def _while_adding(
    index: TokenIndex[int], plan: TokenIndexPlan, tokens: list[int]
) -> tuple[float, dict[str, Any]]:
    """Return the median seconds of adding a chunk, and those of searches while chunks are added."""
    draw, adding, done = np.random.default_rng(SEED + 2), list[float](), Event()

    def add() -> None:
        for name in range(plan.chunks, plan.chunks + min(plan.chunks, 2000)):
            new = drawn(draw, plan.chunk_tokens).tolist()
            started = perf_counter()
            index.add(new, name)
            adding.append(perf_counter() - started)
        index.merge()
        done.set()

    thread, seconds = Thread(target=add), list[float]()
    thread.start()
    while not done.is_set() or not seconds:
        started = perf_counter()
        index.find(tokens)
        seconds.append(perf_counter() - started)
    thread.join()
    row = {"prompt": "without chunks, while adding", "tokens": len(tokens), "found": 0.0}
    return statistics.median(adding), {**row, **_statistics(seconds)}


def show(found: dict[str, Any]) -> None:
    from rich.table import Table

    output.print_facts(
        "token index", {name: value for name, value in found.items() if name != "prompts"}
    )
    table = Table(title="milliseconds of a search")
    table.add_column("prompt")
    for heading in ("tokens", "least", "median", "p95", "found"):
        table.add_column(heading, justify="right")
    for row in found["prompts"]:
        times = [f"{1e3 * row[f'{kind}_seconds']:.2f}" for kind in ("least", "median", "p95")]
        table.add_row(row["prompt"], f"{row['tokens']:,}", *times, f"{row['found']:.1%}")
    output.result_console().print(table)


app = benchmark_app(TokenIndexPlan, measure_token_index, show)

if __name__ == "__main__":
    app()
