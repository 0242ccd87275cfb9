"""The blend pass: fuses cached and fresh KV layer by layer, running layers on chosen rows only.

Source: CacheBlend (arXiv 2405.16444); here with the true causal mask for scattered rows, and with
rows that may be chosen before layer 0, so that no layer computes all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Mask, Positions, Rows
from cacheblend_rag.blend.schedule import Schedule, row_count, top_rows
from cacheblend_rag.blend.selectors import Evidence
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack, probe_layer
from cacheblend_rag.blend.steps import Steps, run_to_end

Attention = Callable[[AttentionCall, FusedKV, Rows], Tensor]
"""Attention of rows over a layer's fused KV, which holds their fresh KV already; returns
(1, rows, heads, head_dim)."""


class GraphedRows(Protocol):
    """Runs whole layers, attention included, on the rows of one prompt as CUDA graphs."""

    def run(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Run one layer on ``hidden`` (1, rows, hidden), and write the rows' fresh KV.

        Returns hidden states that are valid until the next run; None if the layer has to be run
        without a graph.
        """


Graphed = Callable[[Rows, FusedKV], GraphedRows | None]
"""Returns a runner of layers by CUDA graphs for these rows, None to run them without graphs."""


@dataclass
class Candidates:
    """The cached tokens of a prompt and their scores; on the host, whatever the model's device.

    cached: (tokens,) bool, tokens whose KV comes from stored chunks.
    eligible: (tokens,) bool, those of them that may be chosen for recomputation.
    offsets: (tokens,) int64, index in the token's own chunk. prior, question_attention: (tokens,)
    float32 or None.
    """

    cached: Tensor
    eligible: Tensor
    offsets: Tensor
    prior: Tensor | None = None
    question_attention: Tensor | None = None

    @classmethod
    def none(cls, tokens: int) -> Candidates:
        """Return the candidates of a prompt without cached tokens."""
        cached, eligible = torch.zeros(2, tokens, dtype=torch.bool)
        return cls(cached, eligible, torch.zeros(tokens, dtype=torch.long))

    def first(self, count: int) -> Candidates:
        """Return the candidates among the first ``count`` tokens."""
        known = {name: one[:count] for name, one in vars(self).items() if one is not None}
        return replace(self, **known)

    def evidence(self, positions: Positions, **of_layer: Any) -> Evidence:
        """Return a selector's inputs for the tokens at ``positions``.

        of_layer: those of a check layer, see Evidence.
        """

        def at(known: Tensor) -> Tensor:  # read by NumPy: on one thread (see ``top_rows``)
            return torch.from_numpy(known.numpy()[positions])

        prior, asked = self.prior, self.question_attention
        return Evidence(
            offsets=at(self.offsets),
            prior=None if prior is None else at(prior),
            question_attention=None if asked is None else at(asked),
            **of_layer,
        )


@dataclass
class BlendPass:
    """Computes the fused KV of a prompt and the hidden states of its last tokens.

    token_ids: (tokens,) int64, on the model's device. fused: holds the cached tokens' KV,
    re-rotated, or gets it from ``before_layer``. candidates: which tokens those are. last: of how
    many last tokens the hidden states are needed; with 0 only KV is computed. layers: run only so
    many of the first layers, for their KV; None is all. attention: how rows attend; by default
    exactly, as RowAttention chooses. graphed: gives CUDA graphs for layers in which nothing else is
    asked for. before_layer: steps that copy a layer's cached KV into the buffer, run before the
    layer. on_layer: called with each layer whose KV is final. observer: watches the pass.
    selecting: makes a context around each choice of rows, given the check layer, None before layer
    0. request_id: names the pass in logs.

    Each of the ``steps()`` runs one block of rows through one layer, so a caller may do other work
    in between. Afterwards ``hidden`` are the last tokens' hidden states (1, last, hidden),
    ``recomputed``, (tokens,) bool, the cached tokens that were recomputed in all layers, and
    ``work`` the floating-point operations spent.

    The rows to compute are known on the host, so the host never synchronizes with the accelerator
    within a layer: only at a check layer, to read the scores.
    """

    stack: DecoderStack
    token_ids: Tensor
    fused: FusedKV
    candidates: Candidates
    schedule: Schedule
    last: int = 1
    layers: int | None = None
    attention: Attention | None = None
    graphed: Graphed | None = None
    before_layer: Callable[[int], Steps[None]] | None = None
    on_layer: Callable[[int, FusedKV], None] | None = None
    observer: Observer = field(default_factory=Observer)
    selecting: Callable[[int | None], AbstractContextManager[object]] = nullcontext
    request_id: str = ""
    hidden: Tensor = field(init=False)
    recomputed: Mask = field(init=False)
    work: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._cached: Mask = self.candidates.cached.numpy()
        self._eligible: Mask = self.candidates.eligible.numpy()
        self._always: Mask = ~self._cached
        self._always[len(self._always) - self.last :] = True
        self._free: Mask = self._eligible & ~self._always
        self._device = self.stack.geometry.device
        self._attend: Attention = self.attention or RowAttention()
        self._checked: int | None = None

    def steps(self) -> Steps[None]:
        """Run the pass; yields after each block of rows in each layer."""
        self._carry(self._first_rows())
        self.hidden = self.stack.embed(self.token_ids[self._rows.device][None])
        end = self.layers or self.stack.geometry.layers
        for layer in range(end):
            if self.before_layer is not None:
                yield from self.before_layer(layer)
            if layer in self.schedule.checks:
                self._check(layer)
            yield from self._run(layer) if layer < end - 1 else self._finish(layer)
            if self.on_layer is not None:
                self.on_layer(layer, self.fused)
            yield

    # Which rows are computed

    def _first_rows(self) -> Mask:
        if self.schedule.before == 1:
            # Tokens that may not be recomputed keep cached KV in all layers, even before the check.
            return self._always | self._eligible
        if self.schedule.before == 0:
            return self._always
        with self.selecting(None):
            positions = np.flatnonzero(self._free)
            evidence = self.candidates.evidence(positions)
            return self._chosen(None, self.schedule.before, positions, evidence)

    def _check(self, layer: int) -> None:
        """Compare fresh with cached KV, keep all fresh KV of this layer, narrow the rows."""
        with self.selecting(layer):
            here = self._rows.host
            free = Rows.at(here[self._free[here]], self._device)
            cached = self._kv_at(layer, free)
            run_to_end(self._compute_kv(layer, self._blocks))
            evidence = self.candidates.evidence(
                free.host,
                fresh=self._kv_at(layer, free),
                cached=cached,
                total=lambda part: self.stack.all_reduce(part, "sum"),
            )
            self._checked = layer
            kept = self._chosen(layer, self.schedule.checks[layer], free.host, evidence)
            still = Rows.where(kept[here], self._device)
            self.hidden = self.hidden.index_select(1, still.device)
            self._carry(kept)

    def _kv_at(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return a copy of a layer's KV of some rows, each (kv_heads, rows, head_dim)."""
        keys, values = self.fused.of_layer(layer)
        return keys.index_select(1, rows.device), values.index_select(1, rows.device)

    def _chosen(
        self, layer: int | None, ratio: float, positions: Positions, evidence: Evidence
    ) -> Mask:
        """Return the rows to carry on: those always computed and the best candidates."""
        selector = self.schedule.selector
        scores = self.stack.broadcast(selector.score(evidence)).cpu()
        count = row_count(ratio, int(self._eligible.sum()))
        best = positions[top_rows(scores, count)]
        selection = Selection(layer, positions, evidence, scores, best)
        selection.log(self.request_id, selector)
        self.observer.selected(selection)
        keep = self._always.copy()
        keep[best] = True
        return keep

    def _carry(self, mask: Mask) -> None:
        """Let later layers run on the rows where ``mask`` is set."""
        self.recomputed = mask & self._cached
        self._rows = Rows.where(mask, self._device)
        self._blocks = self._blocks_of(self._rows)
        # Graphs attend as RowAttention does, and change nothing else.
        is_plain = len(self._blocks) == 1 and self.attention is None
        self._graphs = self.graphed(self._rows, self.fused) if self.graphed and is_plain else None

    def _blocks_of(self, rows: Rows) -> list[_Block]:
        inputs_of = self.stack.position_inputs
        return [
            _Block(slice(start, start + len(part)), part, inputs_of(part.device[None]))
            for start, part in rows.blocks(self.stack.row_block)
        ]

    # What is computed of them

    def _run(self, layer: int) -> Steps[None]:
        for block in self._blocks:
            if block.here.start:
                yield
            self.hidden[:, block.here] = self._run_block(layer, block, self.hidden[:, block.here])
        self.work += self.stack.costs[layer].run(self._rows)

    def _run_block(self, layer: int, block: _Block, hidden: Tensor) -> Tensor:
        if self._graphs is not None and not self.observer.watches(layer):
            done = self._graphs.run(layer, hidden)
            if done is not None:
                return done

        def attend(call: AttentionCall) -> Tensor:
            self._write(call, block)
            return self._attend(call, self.fused, block.rows)

        return self.stack.run_layer(layer, hidden, block.position_inputs, attend)

    def _finish(self, layer: int) -> Steps[None]:
        """Run the last layer: KV of all rows, and the layer itself for the last tokens alone."""
        others = len(self._rows) - self.last
        yield from self._compute_kv(layer, self._blocks_of(self._rows.part(0, others)))
        self._rows = self._rows.part(others, len(self._rows))
        self._blocks, self._graphs = self._blocks_of(self._rows), None
        self.hidden = self.hidden[:, others:]
        yield from self._run(layer)

    def _compute_kv(self, layer: int, blocks: list[_Block]) -> Steps[None]:
        """Compute and keep fresh KV of blocks of rows, without the rest of the layer."""
        for block in blocks:
            if block.here.start:
                yield
            hidden = self.hidden[:, block.here]
            self._write(probe_layer(self.stack, layer, hidden, block.position_inputs), block)
            self.work += self.stack.costs[layer].probe(len(block.rows))

    def _write(self, call: AttentionCall, block: _Block) -> None:
        """Write the keys and values just computed for a block of rows into the fused KV."""
        if call.layer != self._checked:  # where all rows were written before
            self.observer.replacing(call, block.rows, self.fused)
        self.fused.write(call.layer, block.rows, call.key, call.value)
        self.observer.attended(call, block.rows, self.fused)


@dataclass
class _Block:
    """A block of rows run through a layer at once. here: its slice of the pass's hidden states."""

    here: slice
    rows: Rows
    position_inputs: Any


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its queue."""
    if device.type not in {"cpu", "meta"}:
        torch.accelerator.synchronize(device)
