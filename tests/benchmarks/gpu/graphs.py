"""Step: driven layers on few rows, one after the other, without and with CUDA graphs.

A graph that was captured with some rows of one prompt then runs fewer rows of a shorter one, and is
compared with the ordinary way. ``pays`` says whether graphs save time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.engines.transformers.layer_graphs import LayerGraphs, PromptGraphs
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.errors import CacheBlendError
from tests.benchmarks.gpu.layer import Drive, open_layers, random_kv
from tests.benchmarks.gpu.scene import Doing, Row, Scene
from tests.benchmarks.gpu.timing import Work, attempt, milliseconds, times

LAYERS = 4
"""Layers that are driven one after the other, as in a pass."""
REAL_TOKENS, TOY_TOKENS = (4096, 8192), (64,)
REAL_ROWS, TOY_ROWS = (33, 64, 128, 205, 410, 820), (9,)
SHORTER = 7
"""The second prompt has so many tokens less than the one that graphs are captured with."""
REPEAT = 10
WORTH = 0.95
"""A graph pays if it takes at most this share of the time."""


@dataclass(frozen=True)
class Trial:
    """One number of rows of one length of prompt."""

    scene: Scene
    stack: TransformersStack
    tokens: int
    count: int

    def measured(self) -> Row:
        """Return times per layer in milliseconds, and how far the ways differ.

        ``graph`` includes what a pass does once for its rows; ``take_ms`` is its part.
        """
        rows = self.scene.random_rows(self.tokens, self.count)
        eager = Drive(self.stack, random_kv(self.stack, self.tokens), rows)
        graphs = LayerGraphs(self.stack, self.stack.layers)
        graphs.of(rows, eager.fused)  # graphs are for numbers of rows that come again
        before, began = torch.cuda.memory_reserved(), time.perf_counter()
        _by_graphs(graphs, eager)
        torch.cuda.synchronize()
        seconds, nbytes = time.perf_counter() - began, torch.cuda.memory_reserved() - before
        found = self._timed("eager", eager.all)
        found |= self._timed("graph", partial(_by_graphs, graphs, eager))
        run = graphs.of(rows, eager.fused)
        found["take_ms"] = round(LAYERS * found["graph_ms"], 4)
        if run is not None:
            again = times(self.scene.device, [partial(_run, run, eager)] * REPEAT, warm=2)
            found["take_ms"] = round(found["take_ms"] - again["ms"], 4)
        found["error"] = self._difference(graphs, eager.fused)
        return {**found, **self._verdict(found, seconds, nbytes)}

    def _timed(self, name: str, work: Work) -> Row:
        taken = times(self.scene.device, [work] * REPEAT, warm=2)
        return {f"{name}_{unit}": round(value / LAYERS, 4) for unit, value in taken.items()}

    def _difference(self, graphs: LayerGraphs, fused: FusedKV) -> float:
        """Return how far other rows' results are from the ordinary way's, relative to its size.

        Both begin with the same KV.
        """
        rows = self.scene.random_rows(self.tokens - SHORTER, self.count - 1, seed=1)
        prompts = []
        for _ in range(2):
            shorter = FusedKV(self.stack.geometry, self.tokens - SHORTER)
            shorter.keys.copy_(fused.keys[:, :, : shorter.tokens])
            shorter.values.copy_(fused.values[:, :, : shorter.tokens])
            prompts.append(Drive(self.stack, shorter, rows))
        wanted, found = prompts[0].all(), _by_graphs(graphs, prompts[1])
        return float((found - wanted).float().norm() / wanted.float().norm())

    def _verdict(self, found: Row, seconds: float, nbytes: int) -> Row:
        """Return whether graphs pay in a pass over the whole model, and after how many requests."""
        layers = self.scene.dimensions.layers
        graph = found["graph_ms"] * LAYERS - found["take_ms"]
        saves = layers * (found["eager_ms"] - graph / LAYERS) - found["take_ms"]
        capture = milliseconds(seconds) * layers / LAYERS
        return {
            "capture_ms": round(capture, 1),
            "graph_mib": round(nbytes / 2**20, 1),  # which all layers share
            "pass_saves_ms": round(saves, 2),
            "pays": saves >= (1 - WORTH) * layers * found["eager_ms"],
            "pays_after_requests": round(capture / saves, 1) if saves > 0 else None,
        }


def _by_graphs(graphs: LayerGraphs, drive: Drive) -> Tensor:
    """Return the hidden states after all layers, as a pass gets them."""
    run = graphs.of(drive.rows, drive.fused)
    if run is None:
        raise CacheBlendError("the layers cannot be captured")
    return _run(run, drive)


def _run(run: PromptGraphs, drive: Drive) -> Tensor:
    hidden = drive.hidden
    for layer in range(LAYERS):
        out = run.run(layer, hidden)
        if out is None:
            raise CacheBlendError("the layers cannot be captured")
        hidden = out.clone()
    return hidden


@torch.inference_mode()
def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each length of prompt and number of rows."""
    doing("building the model")
    stack = open_layers(scene, LAYERS)
    for tokens in scene.pick(REAL_TOKENS, TOY_TOKENS):
        for count in scene.pick(REAL_ROWS, TOY_ROWS):
            doing(f"{count} rows of {tokens} tokens")
            trial = Trial(scene, stack, tokens, count)
            yield attempt({"tokens": tokens, "rows": count}, trial.measured)
