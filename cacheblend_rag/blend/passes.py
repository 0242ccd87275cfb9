"""The blend pass: fuses cached and fresh KV layer by layer, running layers on chosen rows only.

Source: CacheBlend (arXiv 2405.16444); here with the true causal mask for scattered rows, and with
rows that may be chosen before layer 0, so that no layer computes all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Mask, Positions, Rows
from cacheblend_rag.blend.schedule import Schedule, log_choice, row_count, top_rows
from cacheblend_rag.blend.selectors import Evidence
from cacheblend_rag.blend.selectors.hkvd import deviations_of
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack, probe_layer
from cacheblend_rag.blend.steps import Steps

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
class PassStats:
    """Results of a pass.

    recomputed: (tokens,) bool, cached tokens recomputed in all layers. work: floating-point
    operations spent.
    """

    recomputed: Mask
    work: float = 0.0


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

        def part(whole: Tensor | None) -> Tensor | None:
            return None if whole is None else whole[:count]

        return Candidates(
            self.cached[:count],
            self.eligible[:count],
            self.offsets[:count],
            part(self.prior),
            part(self.question_attention),
        )

    def evidence(self, positions: Positions, **fresh: Any) -> Evidence:
        """Return a selector's inputs for the tokens at ``positions``; fresh: see Evidence."""
        return Evidence(
            offsets=_at(self.offsets, positions),
            prior=None if self.prior is None else _at(self.prior, positions),
            question_attention=(
                None if self.question_attention is None else _at(self.question_attention, positions)
            ),
            **fresh,
        )


def _unwatched(_: int | None) -> AbstractContextManager[None]:
    """Return a context around a choice of rows that nobody measures."""
    return nullcontext()


@dataclass
class BlendPass:
    """Computes the fused KV of a prompt and the hidden state of its last token.

    token_ids: (tokens,) int64, on the model's device. fused: holds the cached tokens' KV,
    re-rotated, or gets it from ``before_layer``. candidates: which tokens those are. row_block:
    the most rows to run through a layer at once, which bounds the memory of layers that compute
    all tokens; more rows are run in even blocks; None is the stack's default. needs_hidden: whether
    the last tokens' hidden states are needed, or only KV. last: how many of them. attention: how
    rows attend; by default exactly, over the fused KV, as RowAttention chooses. graphed: gives CUDA
    graphs for layers in which nothing else is asked for. layers: run only so many of the first
    layers, for their KV; None is all. before_layer: steps that copy a layer's cached KV into
    the buffer, run before the layer. observers: watch the pass; without any, nothing is computed or
    read back for them. on_layer: called with each layer whose KV is final. selecting: makes a
    context around each choice of rows, given the check layer, None before layer 0. request_id:
    names the pass in logs.

    Each of the ``steps()`` runs one block of rows through one layer, so a caller may do other work
    in between. Afterwards ``stats`` is complete and, if needed, ``hidden`` are the last tokens'
    hidden states (1, last, hidden).

    The rows to compute are known on the host, so the host never synchronizes with the accelerator
    within a layer: only at a check layer, to read the scores.
    """

    stack: DecoderStack
    token_ids: Tensor
    fused: FusedKV
    candidates: Candidates
    schedule: Schedule
    row_block: int | None = None
    observers: Sequence[Observer] = ()
    needs_hidden: bool = True
    last: int = 1
    attention: Attention | None = None
    graphed: Graphed | None = None
    layers: int | None = None
    before_layer: Callable[[int], Steps[None]] | None = None
    on_layer: Callable[[int, FusedKV], None] | None = None
    selecting: Callable[[int | None], AbstractContextManager[None]] = _unwatched
    request_id: str = ""
    hidden: Tensor = field(init=False)
    stats: PassStats = field(init=False)

    def __post_init__(self) -> None:
        self._cached: Mask = self.candidates.cached.numpy()
        self._eligible: Mask = self.candidates.eligible.numpy()
        self._always: Mask = ~self._cached
        if self.needs_hidden:  # the last tokens yield the logits
            self._always[-self.last :] = True
        self._device = self.stack.geometry.device
        self._attend: Attention = self.attention or RowAttention()
        self.stats = PassStats(recomputed=np.zeros_like(self._cached))

    @property
    def compute_share(self) -> float:
        """Work spent, as a share of ordinary prefill of the same prompt."""
        return self.stats.work / prefill_cost(self.stack.costs, self.token_ids.numel())

    def steps(self) -> Steps[None]:
        """Run the pass; yields after each block of rows in each layer."""
        self._carry(self._first_rows())
        self.hidden = self.stack.embed(self.token_ids[self._rows.device][None])
        last = (self.layers or self.stack.geometry.layers) - 1
        for layer in range(last + 1):
            if self.before_layer is not None:
                yield from self.before_layer(layer)
            computed = self._rows  # also where a check lets only some of them go on
            if layer in self.schedule.checks:
                self._check(layer, self.schedule.checks[layer])
            yield from self._finish(layer) if layer == last else self._run(layer)
            for observer in self.observers:
                observer.computed(layer, computed)
            if self.on_layer is not None:
                self.on_layer(layer, self.fused)
            yield
        recomputed = np.zeros_like(self._cached)
        recomputed[self._computed.host] = True
        self.stats.recomputed = recomputed & self._cached

    def run(self) -> None:
        """Run the pass to its end."""
        for _ in self.steps():
            pass

    def _first_rows(self) -> Rows:
        if self.schedule.before is None:
            # Tokens that may not be recomputed keep cached KV in all layers, even before the check.
            return self._rows_where(self._always | self._eligible)
        if self.schedule.before == 0:
            return self._rows_where(self._always)
        with self.selecting(None):
            eligible = np.flatnonzero(self._eligible & ~self._always)
            scores = self.schedule.selector.score(self.candidates.evidence(eligible))
            return self._kept(None, eligible, scores, self.schedule.before)

    def _rows_where(self, mask: Mask) -> Rows:
        return Rows.where(mask, self._device)

    def _kept(
        self,
        layer: int | None,
        candidates: Positions,
        scores: Tensor,
        ratio: float,
        evidence: Evidence | None = None,
    ) -> Rows:
        """Rows to carry on: those always computed and the best candidates."""
        count = row_count(ratio, int(self._eligible.sum()))
        scores = self.stack.broadcast(scores).cpu()
        best = candidates[top_rows(scores, count).numpy()]
        log_choice(self.request_id, layer, self.schedule.selector, candidates, scores, chosen=best)
        if self.observers:
            deviations = () if evidence is None else deviations_of(evidence)
            selection = Selection(layer, candidates, scores, best, *deviations)
            for observer in self.observers:
                observer.selected(selection)
        keep = self._always.copy()
        keep[best] = True
        return self._rows_where(keep)

    def _carry(self, rows: Rows) -> None:
        """Let later layers run on ``rows``."""
        self._rows = self._computed = rows
        self._blocks = [
            _Block(self.stack, slice(start, start + len(part)), part)
            for start, part in rows.blocks(self.row_block or self.stack.row_block)
        ]
        # Graphs attend as RowAttention does, and change nothing else.
        is_plain = len(self._blocks) == 1 and self.attention is None
        self._graphs = None
        if self.graphed is not None and is_plain:
            self._graphs = self.graphed(rows, self.fused)
        if self._graphs is None:
            for block in self._blocks:
                block.prepare()

    def _run(self, layer: int) -> Steps[None]:
        for block in self._blocks:
            if block.here.start:
                yield
            self.hidden[:, block.here] = self._run_block(layer, block, self.hidden[:, block.here])
        self.stats.work += self.stack.costs[layer].run(self._rows)

    def _run_block(self, layer: int, block: _Block, hidden: Tensor) -> Tensor:
        if self._graphs is not None and not any(one.watches(layer) for one in self.observers):
            done = self._graphs.run(layer, hidden)
            if done is not None:
                return done

        def attend(call: AttentionCall) -> Tensor:
            self._write(call, block)
            self._attended(call, block)
            return self._attend(call, self.fused, block.rows)

        return self.stack.run_layer(layer, hidden, block.position_inputs, attend)

    def _write(self, call: AttentionCall, block: _Block) -> None:
        """Write the keys and values just computed for a block of rows into the fused KV."""
        if call.layer not in self.schedule.checks:  # where all rows were written before
            self._replacing(call.layer, block.rows, call.key, call.value)
        self.fused.write(call.layer, block.rows, call.key, call.value)

    def _replacing(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        for observer in self.observers:
            observer.replacing(layer, rows, keys, values, self.fused)

    def _attended(self, call: AttentionCall, block: _Block) -> None:
        for observer in self.observers:
            observer.attended(call, block.rows, self.fused.layer(call.layer)[0])

    def _check(self, layer: int, ratio: float) -> None:
        """Compare fresh with cached KV, keep all fresh KV of this layer, narrow the rows."""
        with self.selecting(layer):
            keys, values = self._fresh(layer)
            self.stats.work += self.stack.costs[layer].probe(len(self._rows))
            here = self._rows.host
            index = self._rows_where((self._eligible & ~self._always)[here])  # among the rows
            rows = Rows.at(here[index.host], self._device)
            cached_keys, cached_values = self.fused.of_layer(layer)
            evidence = self.candidates.evidence(
                rows.host,
                fresh_keys=keys[0].index_select(1, index.device),
                fresh_values=values[0].index_select(1, index.device),
                cached_keys=cached_keys.index_select(1, rows.device),
                cached_values=cached_values.index_select(1, rows.device),
                total=lambda part: self.stack.all_reduce(part, "sum"),
            )
            scores = self.schedule.selector.score(evidence)
            kept = self._kept(layer, rows.host, scores, ratio, evidence)
            self._replacing(layer, self._rows, keys, values)
            self.fused.write(layer, self._rows, keys, values)
            still = self._rows_where(np.isin(self._rows.host, kept.host, assume_unique=True))
            self.hidden = self.hidden.index_select(1, still.device)
            self._carry(kept)

    def _fresh(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of all rows, each (1, kv_heads, rows, head_dim); their queries are not kept."""
        of = self.stack.geometry
        shape = (1, of.kv_heads, len(self._rows), of.head_dim)
        keys = torch.empty(shape, dtype=of.dtype, device=of.device)
        values = torch.empty_like(keys)
        for block in self._blocks:
            call = self._probe(layer, block)
            keys[:, :, block.here], values[:, :, block.here] = call.key, call.value
        return keys, values

    def _finish(self, layer: int) -> Steps[None]:
        """The last layer: K and V of every row, the layer itself for the last tokens at most."""
        computed = self._rows
        only_last = self.needs_hidden and len(computed) == self.last
        if len(computed) and not only_last:
            for block in self._blocks:
                if block.here.start:
                    yield
                call = self._probe(layer, block)
                self._write(call, block)
                self._attended(call, block)
            self.stats.work += self.stack.costs[layer].probe(len(computed))
        if not self.needs_hidden:
            return
        self.hidden = self.hidden[:, -self.last :]
        observers, self.observers = self.observers, ()  # which have seen this layer
        self._carry(computed.part(len(computed) - self.last, len(computed)))
        yield from self._run(layer)
        self.observers, self._computed = observers, computed

    def _probe(self, layer: int, block: _Block) -> AttentionCall:
        return probe_layer(self.stack, layer, self.hidden[:, block.here], block.position_inputs)


@dataclass
class _Block:
    """A block of rows run through a layer at once. here: its slice of the pass's hidden states."""

    stack: DecoderStack
    here: slice
    rows: Rows

    @cached_property
    def position_inputs(self) -> Any:
        """Of the rows; graphs have their own."""
        return self.stack.position_inputs(self.rows.device[None])

    def prepare(self) -> None:
        """Make the position inputs now, and not within a layer."""
        _ = self.position_inputs


def _at(whole: Tensor, positions: Positions) -> Tensor:
    """Return a host tensor's elements, read by NumPy: on one thread (see ``top_rows``)."""
    return torch.from_numpy(whole.numpy()[positions])


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its queue."""
    if device.type not in {"cpu", "meta"}:
        torch.accelerator.synchronize(device)
