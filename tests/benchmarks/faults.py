"""What requests pay for a tier that is dead, once its first failure is behind them.

One engine has memory alone, the others a Redis below it, that was filled, too, and then died: its
port refuses, or it answers nothing and leaves connections open. Both ways of asking count: for
chunks that memory has, and for such as no tier has, where the dead one would have to be asked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.plan import ModelPlan, option
from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    draw_chunks,
    draw_words,
)
from cacheblend_rag.cli import output
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.settings import BlendConfig, StoreConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app
from tests.local_servers import Server, redis_server, redis_url

ALONE = "none"
DEATHS: Mapping[str, Callable[[Server], None]] = {"refuses": Server.kill, "hangs": Server.pause}
SELECTOR = "hkvd"
CONFIG = BlendConfig(recompute_ratio=0.0, selector=SELECTOR, min_tokens=0, reuse_prefix=False)
"""Nothing is recomputed: no engine then decides that ordinary prefill is faster, and all do alike.
"""
TIMEOUT_SECONDS = 1
"""Of the Redis that hangs: what the first request waits for."""


@dataclass(frozen=True, kw_only=True)
class FaultsPlan(ModelPlan):
    """What requests pay for a dead Redis below memory, after its first failure."""

    chunks: int = option(4, "Chunks in the prompt.", least=1)
    chunk_tokens: int = option(96, "Tokens a chunk.", least=1)
    question_tokens: int = option(16, "Tokens behind the chunks.", least=1)
    repeat: int = option(20, "Timed turns; medians are shown.", least=1)
    seed: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_shape.check_prompt(self.chunks * self.chunk_tokens + self.question_tokens)


def measure_faults(plan: FaultsPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``rows``: by what became of Redis and where chunks are, seconds with it and without.

    ratio: the median over turns of one by the other, which follow each other in each turn.
    """
    advance("building the model")
    model, tokenizer = plan.model_shape.load(dtype=plan.torch_dtype, device=plan.torch_device)
    stored, prompts = _prompts(plan)
    with ExitStack() as stack:
        engines = {}
        for death in (ALONE, *DEATHS):
            advance(f"precomputing, Redis {death}")
            store, die = _store(death, stack)
            engines[death] = engine = TransformersEngine(
                model, tokenizer=tokenizer, lead_in=LEAD_IN, store=store
            )
            stack.callback(engine.close)
            engine.precompute(stored, progress=False)
            die()
        cases: dict[str, Case] = {
            f"{where} chunks, Redis {death}": partial(_ask, engine, prompts[where], where)
            for where in prompts
            for death, engine in engines.items()
        }
        runs = run_in_turns(cases, plan.repeat, advance)
        for death in DEATHS:
            _check_out(engines[death])
    taken = iter(runs.values())
    found = {where: {death: next(taken) for death in engines} for where in prompts}
    return {"rows": [_row(where, death, found[where]) for where in found for death in DEATHS]}


def _row(where: str, death: str, found: Mapping[str, list[float]]) -> dict[str, Any]:
    pairs = zip(found[death], found[ALONE], strict=True)
    return {
        "redis": death,
        "chunks": where,
        "seconds": median(found[death]),
        "alone_seconds": median(found[ALONE]),
        "ratio": median(dead / alone for dead, alone in pairs),
    }


def _prompts(plan: FaultsPlan) -> tuple[list[Chunk], dict[str, BlendPrompt]]:
    """Return the chunks to store, and a prompt of those and of as many others."""
    rng, vocabulary = random.Random(plan.seed), plan.model_shape.vocabulary
    question = draw_words(rng, plan.question_tokens, vocabulary)
    stored, missing = (
        draw_chunks(rng, plan.chunks, plan.chunk_tokens, vocabulary, selector=SELECTOR, name=name)
        for name in ("stored", "missing")
    )
    return stored, {
        "stored": BlendPrompt.of(*stored, question),
        "missing": BlendPrompt.of(*missing, question),
    }


def _store(death: str, stack: ExitStack) -> tuple[TieredKVStore, Callable[[], None]]:
    """Return a store, and what lets its Redis die, which it has but for ``ALONE``."""
    memory = "host://?capacity=none"
    if death == ALONE:
        return TieredKVStore.of(StoreConfig(tiers=(memory,))), lambda: None
    server = stack.enter_context(redis_server())
    far = redis_url(server, f"timeout={TIMEOUT_SECONDS}s")
    return TieredKVStore.of(StoreConfig(tiers=(memory, far))), partial(DEATHS[death], server)


def _ask(engine: TransformersEngine, prompt: BlendPrompt, where: str, _turn: int) -> float:
    started = time.perf_counter()
    answer = engine.generate(prompt, ONE_TOKEN, config=CONFIG)
    seconds = time.perf_counter() - started
    if any(chunk.hit != (where == "stored") for chunk in answer.report.chunks):
        raise CacheBlendError(f"{where} chunks were not: {answer.report.reason or 'a hit'}")
    return seconds


def _check_out(engine: TransformersEngine) -> None:
    far = engine.store.tiers[1]
    if not far.access.reading.is_out:
        raise CacheBlendError("Redis is not as dead as it was made")


def show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        output.print_facts(f"Redis {row.pop('redis')}, {row.pop('chunks')} chunks", row)


app = benchmark_app(FaultsPlan, measure_faults, show)

if __name__ == "__main__":
    app()
