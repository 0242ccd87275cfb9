"""What to expect of time to first token on a GPU, by arithmetic; nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.bench.shapes import ModelShape, named_shape
from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.cli import output
from cacheblend_rag.errors import ConfigError
from tests.benchmarks.command import benchmark_app

CHUNK, QUESTION, BYTES = 512, 32, 2
TOUCHES = 120
"""How often a layer reads or writes each hidden state outside its products and attention, in
effect: so many match the layers that were measured on an H100, whose norms and rotary embedding are
many small kernels."""
FIXED = 6e-3
"""Seconds that a request takes beside its layers: tokens, finding chunks, embedding, logits."""
GRAPHED_ROWS = 1024
"""Up to so many rows, layers are CUDA graphs."""
GRAPHED, QUEUED = 0.35e-3, 1.2e-3
"""Seconds of the thread that drives the model for each layer, with the launch that lays its chunks:
as a graph, and kernel by kernel."""


@dataclass(frozen=True)
class Card:
    """Speeds. products, causal, scattered: operations per second of bfloat16.

    causal: of a whole prompt's attention. scattered: of the kernel for scattered rows. memory,
    link: bytes per second in the device, and to it.
    """

    products: float
    causal: float
    scattered: float
    memory: float
    link: float


CARDS = {
    "H100": Card(760e12, 590e12, 285e12, 3.0e12, 49e9),
    "H200": Card(760e12, 590e12, 285e12, 4.2e12, 49e9),
    "A100": Card(230e12, 180e12, 110e12, 1.5e12, 24e9),
    "L40S": Card(190e12, 140e12, 90e12, 0.75e12, 24e9),
}
WAYS = {"hkvd 0.15": (0.15, True), "before layer 0, 0.05": (0.05, False)}
"""The ratio, and whether all tokens are computed up to a check at layer 1."""


@dataclass(frozen=True, kw_only=True)
class ExpectedPlan(Plan):
    """Expected time to first token of llama-3.1-8b on a GPU, in milliseconds, by arithmetic.

    docs/gpu.md explains it. Nothing is measured.
    """

    cards: tuple[str, ...] = option(tuple(CARDS), f"{', '.join(CARDS)}; repeatable.", flag="--card")
    tokens: tuple[int, ...] = option((4096, 8192, 16384), "Tokens of chunks; repeatable.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for card in self.cards:
            if card not in CARDS:
                raise ConfigError(f"card={card!r} must be one of {', '.join(CARDS)}")


@dataclass(frozen=True)
class Prefill:
    """A prompt's layers on a card; all results in seconds."""

    card: Card
    shape: ModelShape
    tokens: int

    @property
    def cost(self) -> LayerCost:
        """The operations of one layer."""
        of, width = self.shape, self.shape.hidden // self.shape.heads
        projections = of.hidden * (of.heads + 2 * of.kv_heads) * width
        weights = projections + of.hidden * of.hidden + 3 * of.hidden * of.intermediate
        return LayerCost(2.0 * weights, 2.0 * projections, 4.0 * of.heads * width)

    def ordinary(self) -> float:
        whole = Rows(np.arange(self.tokens), torch.empty(0))
        return self.shape.layers * self.layer(whole, self.card.causal) + FIXED

    def blend(self, ratio: float, has_check: bool) -> float:
        """Return the time of a blend: in each layer the slowest of device, host and link counts."""
        rows = self.chosen(ratio)
        link = self.kv_bytes() / self.card.link
        host = GRAPHED if len(rows) <= GRAPHED_ROWS else QUEUED
        layer = max(self.layer(rows, self.card.scattered), host, link)
        seconds = link + self.shape.layers * layer + FIXED
        if not has_check:
            return seconds
        whole = Rows(np.arange(self.tokens), torch.empty(0))
        check = self.products(self.cost.probe(self.tokens), self.cost.per_row_probe)
        return seconds - layer + self.layer(whole, self.card.causal) + check

    def chosen(self, ratio: float) -> Rows:
        """Return rows spread evenly over the chunks, and the question."""
        chunks = self.tokens - QUESTION
        spread = np.linspace(0, chunks - 1, round(ratio * chunks)).astype(np.int64)
        return Rows(np.append(spread, np.arange(chunks, self.tokens)), torch.empty(0))

    def layer(self, rows: Rows, attention: float) -> float:
        """Return what the device takes for a layer; attention: operations per second of it."""
        hidden = TOUCHES * len(rows) * self.shape.hidden * BYTES / self.card.memory
        products = self.products(self.cost.per_row * len(rows), self.cost.per_row)
        return products + self.cost.per_pair * rows.pairs(None) / attention + hidden

    def products(self, work: float, per_row: float) -> float:
        """Return the time of matrix products, whose weights are read at least once."""
        return max(work / self.card.products, per_row / 2 * BYTES / self.card.memory)

    def kv_bytes(self) -> float:
        """Return the size of the chunks' KV in one layer."""
        width = self.shape.hidden // self.shape.heads
        return 2 * self.shape.kv_heads * width * BYTES * (self.tokens - QUESTION)


def expected(plan: ExpectedPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return a row for each card, length of prompt and kind of blend, in milliseconds."""
    return {"rows": list(_rows(plan))}


def _rows(plan: ExpectedPlan) -> Iterator[dict[str, Any]]:
    shape = named_shape("llama-3.1-8b")
    for card in plan.cards:
        for tokens in plan.tokens:
            prefill = Prefill(CARDS[card], shape, tokens + QUESTION)
            for way, (ratio, has_check) in WAYS.items():
                ordinary = prefill.ordinary()
                seconds = prefill.blend(ratio, has_check)
                yield {
                    "card": card, "tokens": tokens, "way": way, "ordinary": 1e3 * ordinary,
                    "blend": 1e3 * seconds, "speedup": ordinary / seconds,
                }  # fmt: skip


def markdown(found: dict[str, Any]) -> list[str]:
    """Return the rows as they stand in docs/gpu.md."""
    return [
        f"| {row['card']} | {row['tokens']:,} | {row['way']} | {row['ordinary']:.0f} | "
        f"{row['blend']:.0f} ({row['speedup']:.1f}x) |"
        for row in found["rows"]
    ]


def show(found: dict[str, Any]) -> None:
    headings = ("card", "tokens", "way", "ordinary", "blend")
    rows = [line.strip("| ").split(" | ") for line in markdown(found)]
    output.print_rows(headings, rows)


app = benchmark_app(ExpectedPlan, expected, show)

if __name__ == "__main__":
    app()
