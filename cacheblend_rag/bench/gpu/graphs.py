"""Step: an experiment on driven layers with padded rows, and as CUDA graphs.

At few rows a fast GPU computes a layer sooner than the host can queue it. A CUDA graph queues it as
one piece, but what it holds is fixed: addresses, shapes and Python numbers. So here every input
stands in a buffer of its own, the rows are padded to a multiple, and attention goes over the whole
capacity with a mask. A graph that was captured with some rows of one prompt then runs other rows of
a shorter one, and is compared with the ordinary way. ``pays`` says whether it saves time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cacheblend_rag.bench.gpu.kernels import PaddedAttention, padded_on
from cacheblend_rag.bench.gpu.layer import Drive, open_layers, random_kv, random_rows
from cacheblend_rag.bench.gpu.scene import NO_CUDA, Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import attempt, milliseconds, times
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.transformers.stack import TransformersStack

LAYERS = 4
"""Layers that are driven one after the other, as in a pass."""
REAL_TOKENS, TOY_TOKENS = (4096, 8192), (64,)
REAL_ROWS, TOY_ROWS = (33, 64, 128, 205, 410, 820), (9,)
REAL_MULTIPLE, TOY_MULTIPLE = 64, 4
SHORTER = 7
"""The second prompt has so many tokens less than the one that graphs are captured with."""
REPEAT = 10
WORTH = 0.95
"""A graph pays if it takes at most this share of the time."""


def padded_mask(positions: Tensor, capacity: int, copies: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to logits, (copies x rows, capacity): 0 or -infinity.

    positions: (rows,). Keys behind a row, those beyond the prompt among them, are hidden.
    """
    keys = torch.arange(capacity, device=positions.device)
    hidden = (keys[None] > positions[:, None]).repeat(copies, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
        hidden, -torch.inf
    )


class PaddedDrive:
    """Drives layers on padded rows; all inputs stand in buffers that ``take`` fills anew.

    The rows that pad are the last one again: their KV is the same, so writing it changes nothing.
    """

    def __init__(
        self, stack: TransformersStack, fused: FusedKV, rows: int, attend: PaddedAttention
    ) -> None:
        self.stack, self.fused, self._attend = stack, fused, attend
        of = stack.geometry
        self._copies, self._capacity = of.heads // of.kv_heads, fused.keys.shape[2]
        self.positions = torch.zeros(rows, dtype=torch.long, device=of.device)
        self.inputs = stack.position_inputs(self.positions[None])
        self.hidden = stack.embed(self.positions[None])
        self.mask = padded_mask(self.positions, self._capacity, self._copies, of.dtype)

    def take(self, drive: Drive) -> None:
        """Fill the buffers with the rows of a prompt."""
        count, missing = len(drive.rows), len(self.positions) - len(drive.rows)
        self.positions[:count] = drive.rows.device
        self.positions[count:] = drive.rows.device[-1]
        self.hidden[:, :count] = drive.hidden
        self.hidden[:, count:] = drive.hidden[:, -1:].expand(-1, missing, -1)
        new = self.stack.position_inputs(self.positions[None])
        for into, tensor in zip(_tensors(self.inputs), _tensors(new), strict=True):
            into.copy_(tensor)
        mask = padded_mask(self.positions, self._capacity, self._copies, self.mask.dtype)
        self.mask.copy_(mask)

    def layer(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the hidden states after one layer; no number of it comes from the host."""
        keys, values = self.fused.of_layer(layer)

        def attend(call: AttentionCall) -> Tensor:
            keys.index_copy_(1, self.positions, call.key[0])
            values.index_copy_(1, self.positions, call.value[0])
            return self._attend(call, keys[None], values[None], self.positions, self.mask)

        return self.stack.run_layer(layer, hidden, self.inputs, attend)

    def all(self) -> Tensor:
        """Return the hidden states after all layers."""
        hidden = self.hidden
        for layer in range(self.stack.geometry.layers):
            hidden = self.layer(layer, hidden)
        return hidden


def _tensors(inputs: Any) -> list[Tensor]:
    """Return the different tensors among the arguments of all layers."""
    leaves = [leaf for leaf in tree_leaves(inputs.arguments) if isinstance(leaf, Tensor)]
    return list({id(leaf): leaf for leaf in leaves}.values())


class CapturedDrive:
    """The layers of a PaddedDrive as CUDA graphs, one per layer.

    Between two of them a pass waits for the next layer's stored KV, so one graph for all would not
    do. seconds: how long capturing took. nbytes: the memory it holds.
    """

    def __init__(self, padded: PaddedDrive) -> None:
        device = padded.positions.device
        self._warm(padded, device)
        before, began = torch.cuda.memory_reserved(device), time.perf_counter()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        pool, hidden = torch.cuda.graph_pool_handle(), padded.hidden
        for layer in range(padded.stack.geometry.layers):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = padded.layer(layer, hidden)
            self._graphs.append(graph)
        torch.cuda.synchronize(device)
        self.hidden, self.seconds = hidden, time.perf_counter() - began
        self.nbytes = torch.cuda.memory_reserved(device) - before

    def _warm(self, padded: PaddedDrive, device: torch.device) -> None:
        """Run the layers once on another stream, as capturing requires."""
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            padded.all()
        torch.cuda.current_stream(device).wait_stream(stream)

    def all(self) -> Tensor:
        """Return the hidden states after all layers."""
        for graph in self._graphs:
            graph.replay()
        return self.hidden


@dataclass(frozen=True)
class Trial:
    """One number of rows of one length of prompt."""

    scene: Scene
    stack: TransformersStack
    tokens: int
    count: int
    attend: PaddedAttention

    @property
    def padded_rows(self) -> int:
        """The rows, padded."""
        multiple = self.scene.pick(REAL_MULTIPLE, TOY_MULTIPLE)
        return -(-self.count // multiple) * multiple

    def measured(self) -> Row:
        """Return times per layer in milliseconds, and how far the ways differ."""
        rows = random_rows(self.scene, self.tokens, self.count)
        fewer = self.count - 1
        other = random_rows(self.scene, self.tokens - SHORTER, fewer, seed=1)
        eager = Drive(self.stack, random_kv(self.stack, self.tokens), rows)
        padded = PaddedDrive(self.stack, eager.fused, self.padded_rows, self.attend)
        padded.take(eager)
        found: Row = {"padded_rows": self.padded_rows}
        found |= self._timed("eager", eager) | self._timed("padded", padded)
        if not self.scene.has_cuda:
            error = self._difference(padded, padded, other)
            return {**found, "error": error, "graph_ms": NO_CUDA}
        captured = CapturedDrive(padded)
        found |= self._timed("graph", captured)
        found["take_ms"] = times(self.scene.device, [partial(padded.take, eager)] * REPEAT)["ms"]
        found["error"] = self._difference(padded, captured, other)
        return {**found, **self._verdict(found, captured)}

    def _timed(self, name: str, drive: Drive | PaddedDrive | CapturedDrive) -> Row:
        taken = times(self.scene.device, [drive.all] * self.scene.pick(REPEAT, 2), warm=2)
        return {f"{name}_{unit}": round(value / LAYERS, 4) for unit, value in taken.items()}

    def _difference(
        self, padded: PaddedDrive, ready: PaddedDrive | CapturedDrive, rows: Rows
    ) -> float:
        """Return how far other rows' results are from the ordinary way's, relative to its size.

        Both begin with the same KV.
        """
        shorter = FusedKV(self.stack.geometry, self.tokens - SHORTER)
        shorter.keys.copy_(padded.fused.keys[:, :, : shorter.tokens])
        shorter.values.copy_(padded.fused.values[:, :, : shorter.tokens])
        eager = Drive(self.stack, shorter, rows)
        wanted = eager.all()
        padded.take(eager)
        found = ready.all()[:, : len(rows)]
        return float((found - wanted).float().norm() / wanted.float().norm())

    def _verdict(self, found: Row, captured: CapturedDrive) -> Row:
        """Return whether graphs pay in a pass over the whole model, and after how many requests."""
        layers = self.scene.dimensions.layers
        eager = layers * found["eager_ms"]
        graph = layers * found["graph_ms"] + found["take_ms"]
        capture = milliseconds(captured.seconds) * layers / LAYERS
        return {
            "capture_ms": round(capture, 1),
            "graph_mib": round(captured.nbytes * layers / LAYERS / 2**20, 1),
            "pass_saves_ms": round(eager - graph, 2),
            "pays": graph <= WORTH * eager,
            "pays_after_requests": round(capture / (eager - graph), 1) if graph < eager else None,
        }


@torch.inference_mode()
def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each length of prompt, number of rows and kernel."""
    doing("building the model")
    stack = open_layers(scene, LAYERS)
    for tokens in scene.pick(REAL_TOKENS, TOY_TOKENS):
        for count in scene.pick(REAL_ROWS, TOY_ROWS):
            for name, attend in padded_on(scene.device).items():
                doing(f"{count} rows of {tokens} tokens, {name}")
                trial = Trial(scene, stack, tokens, count, attend)
                label = {"tokens": tokens, "rows": count, "kernel": name}
                yield attempt(label, trial.measured)
