"""How a store with room for a part of a corpus warms by its traffic alone: fill on miss.

All chunks are registered and none is stored. Requests draw chunks by Zipf's law, one after another,
with a pause between them in which the engine fills what they missed. Each hundred of requests is
held against ordinary prefill of some of the same prompts, measured in between.

Then neighbours, whose prompts hold no chunk, are asked in turn while many chunks wait to be filled
and while none does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import option
from cacheblend_rag.bench.plans import BlendPlan, check_drawn
from cacheblend_rag.bench.shapes import ModelShape, named_shape
from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    draw_chunks,
    draw_ranks,
    draw_words,
    zipf_weights,
)
from cacheblend_rag.cli import output
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.quantiles import p95

ROW_REQUESTS = 100
BASELINE_EVERY = 5
"""Of so many requests one is also answered by ordinary prefill."""
NEIGHBOUR_TURNS = 10
MISSED, MISSED_AT_ONCE = 32, 8
"""Chunks that wait to be filled while neighbours ask, and how many of them one prompt misses."""
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class FillPlan(BlendPlan):
    """How a store with room for a part of the corpus warms by its traffic: fill on miss.

    Nothing is precomputed: registered chunks are filled as requests miss them. Of a model with so
    few layers, a selector that ranks at a check layer would run most of them in full.
    """

    layers: int = option(4, "Layers of that shape.", least=2)
    chunks: int = option(20_000, "Registered chunks.", least=1)
    room: float = option(0.05, "Share of them that the store has room for.")
    requests: int = option(1000, "Requests, one after another.", least=1)
    drawn: int = option(4, "Chunks a request draws.", least=1)
    chunk_tokens: int = option(64, "Tokens a chunk.", least=1)
    question_tokens: int = option(16, "Tokens behind the chunks.", least=1)
    exponent: float = option(1.0, "Of Zipf's law.", least=0)
    pause_seconds: float = option(
        0.1, "Seconds between two requests, in which chunks are filled.", flag="--pause", least=0
    )
    neighbours: int = option(200, "Timed requests without chunks.", least=1)
    neighbour_tokens: int = 128
    ratio: float = option(0.15, "Recompute ratio.")
    selector: str = option("chunk_head", "The selector.")
    seed: int = option(7, "Draws chunks and requests.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drawn(self.drawn, self.chunks)
        if not 0 < self.room <= 1:
            raise ConfigError(f"room={self.room} must be above 0 and at most 1")
        self.blend_config(self.ratio)

    @property
    def model_shape(self) -> ModelShape:
        """The shape's dimensions, with the plan's layers."""
        return replace(named_shape(self.shape), layers=self.layers)

    @property
    def store_bytes(self) -> int:
        """Bytes of KV that the store has room for."""
        chunk = self.model_shape.kv_bytes(self.chunk_tokens, self.torch_dtype)
        return int(self.chunks * self.room) * chunk


@dataclass
class _Hundred:
    """What some requests did. seen: draws of chunks that were drawn before, which is most hits."""

    hits: int = 0
    seen: int = 0
    draws: int = 0

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.full_seconds: list[float] = []

    def to_dict(self) -> dict[str, Any]:
        """Return shares and the speedup over ordinary prefill."""
        return {
            "requests": len(self.seconds),
            "hit_share": self.hits / self.draws,
            "seen_share": self.seen / self.draws,
            "speedup": fmean(self.full_seconds) / fmean(self.seconds),
        }


def measure_fill(plan: FillPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return hit share and speedup by hundreds of requests, neighbours' latency, and counts."""
    advance("building the model and registering chunks")
    run = _Run(plan, advance)
    try:
        run.warm_up()
        hundreds = [hundred.to_dict() for hundred in run.hundreds()]
        warmed = run.engine.fill_report()
        neighbours = run.neighbours()
    finally:
        run.engine.close()
    return {
        "hundreds": hundreds,
        "neighbours": neighbours,
        "computed": warmed.computed,
        "refused": sum(warmed.refused.values()),
        "dropped": warmed.dropped,
        "fill_seconds": warmed.seconds,
        "chunks": plan.chunks,
        "room_chunks": int(plan.chunks * plan.room),
        "shape": plan.shape,
        "layers": plan.layers,
        "drawn": plan.drawn,
        "chunk_tokens": plan.chunk_tokens,
        "question_tokens": plan.question_tokens,
        "exponent": plan.exponent,
        "pause_seconds": plan.pause_seconds,
        "selector": plan.selector,
        "ratio": plan.ratio,
        "seed": plan.seed,
    }


class _Run:
    def __init__(self, plan: FillPlan, advance: Advance) -> None:
        self._plan, self._advance = plan, advance
        self._rng, vocabulary = random.Random(plan.seed), plan.model_shape.vocabulary
        self._chunks = draw_chunks(
            self._rng,
            plan.chunks,
            plan.chunk_tokens,
            vocabulary,
            selector=plan.selector,
            name="bench",
        )
        self._weights = zipf_weights(plan.chunks, plan.exponent)
        model, tokenizer = plan.model_shape.load(dtype=plan.torch_dtype, device=plan.torch_device)
        self.engine = TransformersEngine(
            model,
            tokenizer=tokenizer,
            config=plan.blend_config(plan.ratio),
            store=TieredKVStore.open(host_bytes=plan.store_bytes),
            lead_in=LEAD_IN,
            fill_on_miss=True,
        )
        self.engine.register(self._chunks)

    def warm_up(self) -> None:
        """Run everything once, with chunks that nobody registered or asks for again."""
        plan = self._plan
        others = draw_chunks(
            self._rng,
            plan.drawn,
            plan.chunk_tokens,
            plan.model_shape.vocabulary,
            selector=plan.selector,
            name="other",
        )
        self.engine.precompute(others, progress=False)
        self._timed(self._asking(others))
        self._timed(self._asking(others), full=True)
        self.engine.store.evict_where(lambda *_: True)

    def hundreds(self) -> Iterator[_Hundred]:
        """Ask all requests, and tell what came of each hundred of them."""
        drawn_before: set[Chunk] = set()
        for start in range(0, self._plan.requests, ROW_REQUESTS):
            self._advance(f"request {start} of {self._plan.requests}")
            done = _Hundred()
            for index in range(start, min(start + ROW_REQUESTS, self._plan.requests)):
                chunks = self._draw()
                done.draws += len(chunks)
                done.seen += len(drawn_before.intersection(chunks))
                drawn_before.update(chunks)
                prompt = self._asking(chunks)
                if index % BASELINE_EVERY == 0:
                    done.full_seconds.append(self._timed(prompt, full=True)[0])
                seconds, hits = self._timed(prompt)
                done.seconds.append(seconds)
                done.hits += hits
                time.sleep(self._plan.pause_seconds)
            yield done

    def neighbours(self) -> dict[str, Any]:
        """Return the latency of prompts without chunks while chunks are filled, and otherwise."""
        seconds: dict[str, list[float]] = {"filling": [], "idle": []}
        asked = max(1, self._plan.neighbours // (2 * NEIGHBOUR_TURNS))
        computed = self.engine.fill_report().computed
        for turn in range(NEIGHBOUR_TURNS):
            self._advance(f"neighbours: turn {turn + 1} of {NEIGHBOUR_TURNS}")
            self._miss_many()
            seconds["filling"] += self._ask_neighbours(asked)
            self._wait_until_filled()
            seconds["idle"] += self._ask_neighbours(asked)
        return {
            "requests": 2 * asked * NEIGHBOUR_TURNS,
            "filled_meanwhile": self.engine.fill_report().computed - computed,
            "filling_median_seconds": median(seconds["filling"]),
            "idle_median_seconds": median(seconds["idle"]),
            "filling_p95_seconds": p95(seconds["filling"]),
            "idle_p95_seconds": p95(seconds["idle"]),
            "median_ratio": median(seconds["filling"]) / median(seconds["idle"]),
            "p95_ratio": p95(seconds["filling"]) / p95(seconds["idle"]),
        }

    def _miss_many(self) -> None:
        """Empty the store, and miss more chunks than are filled while neighbours ask."""
        self.engine.store.evict_where(lambda *_: True)
        missed = self._rng.sample(self._chunks, min(MISSED, len(self._chunks)))
        for start in range(0, len(missed), MISSED_AT_ONCE):
            self.engine.generate(self._asking(missed[start : start + MISSED_AT_ONCE]), ONE_TOKEN)

    def _wait_until_filled(self) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while self.engine.fill_report().waiting and time.monotonic() < end:
            time.sleep(0.05)

    def _ask_neighbours(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            time.sleep(self._plan.pause_seconds)
            words = draw_words(
                self._rng, self._plan.neighbour_tokens, self._plan.model_shape.vocabulary
            )
            seconds.append(self._timed(BlendPrompt.of(words))[0])
        return seconds

    def _draw(self) -> list[Chunk]:
        """Draw distinct chunks by Zipf's law."""
        ranks = draw_ranks(self._rng, self._weights, self._plan.drawn)
        return [self._chunks[rank] for rank in ranks]

    def _asking(self, chunks: Sequence[Chunk]) -> BlendPrompt:
        plan = self._plan
        question = draw_words(self._rng, plan.question_tokens, plan.model_shape.vocabulary)
        return BlendPrompt.of(*chunks, question)

    def _timed(self, prompt: BlendPrompt, *, full: bool = False) -> tuple[float, int]:
        """Return seconds to the first token, and how many chunks were hits."""
        ask = self.engine.generate_full if full else self.engine.generate
        started = time.perf_counter()
        answer = ask(prompt, ONE_TOKEN)
        seconds = time.perf_counter() - started
        return seconds, sum(chunk.hit for chunk in answer.report.chunks)


def show(found: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"{found['chunks']:,} chunks registered, room for {found['room_chunks']:,}"
    table = Table(title=title)
    for heading in ("requests", "hits", "asked before", "speedup"):
        table.add_column(heading, justify="right")
    asked = 0
    for row in found["hundreds"]:
        asked += row["requests"]
        table.add_row(
            f"{asked:,}",
            output.percent(row["hit_share"]),
            output.percent(row["seen_share"]),
            f"{row['speedup']:.2f}x",
        )
    output.result_console().print(table)
    output.print_facts("requests without chunks, meanwhile", found["neighbours"])


app = benchmark_app(FillPlan, measure_fill, show)

if __name__ == "__main__":
    app()
