"""BlendPass: fuse cached and fresh KV, one layer at a time, running layers on the chosen rows only.

Source: CacheBlend (arXiv 2405.16444); here with the true causal mask for scattered rows, and with
rows that may be chosen before layer 0, so that no layer computes all tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attend_rows
from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.selection import Schedule, row_count, top_rows
from cacheblend_rag.blend.selectors import Evidence
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack

ROW_BLOCK = 768
"""Most rows run through a layer at once, unless said otherwise."""

Observer = Callable[[AttentionCall, Tensor, Tensor], None]
"""Sees each attention call, the positions (rows,) of its rows, and the layer's fused keys."""


Attention = Callable[[AttentionCall, FusedKV, Tensor], Tensor]
"""Attention of rows at positions (rows,) over a layer's fused KV, which holds their fresh KV
already; returns (1, rows, heads, head_dim)."""


@dataclass
class PassStats:
    """What a pass did. ``recomputed``: (tokens,) bool, cached tokens that were computed to the end.

    work: floating-point operations spent.
    """

    recomputed: Tensor
    selection_seconds: float = 0.0
    work: float = 0.0


@dataclass
class Candidates:
    """The cached tokens of a prompt.

    cached: (tokens,) bool, tokens whose KV lies in the fused buffer already.
    eligible: (tokens,) bool, those of them that may be chosen for recomputation.
    offsets: (tokens,) int64, index in the token's own chunk. prior, question_attention: (tokens,)
    float32 or None.
    """

    cached: Tensor
    eligible: Tensor
    offsets: Tensor
    prior: Tensor | None = None
    question_attention: Tensor | None = None

    def first(self, count: int) -> Candidates:
        """Return what is known of the first ``count`` tokens."""
        prior, attention = self.prior, self.question_attention
        return Candidates(
            self.cached[:count],
            self.eligible[:count],
            self.offsets[:count],
            None if prior is None else prior[:count],
            None if attention is None else attention[:count],
        )

    def evidence(self, rows: Tensor, **fresh: Any) -> Evidence:
        """Return what is known about the tokens at positions ``rows``; fresh: see Evidence."""
        return Evidence(
            offsets=self.offsets[rows],
            prior=None if self.prior is None else self.prior[rows],
            question_attention=(
                None if self.question_attention is None else self.question_attention[rows]
            ),
            **fresh,
        )


@dataclass
class BlendPass:
    """Computes the fused KV of a prompt and the hidden state of its last token.

    token_ids: (tokens,) int64. fused: holds the cached tokens' KV, re-rotated. candidates: which
    tokens those are. row_block: most rows run through a layer at once, which bounds the memory of
    layers that compute all tokens; more are run in blocks of one size. needs_hidden: whether the
    last token's hidden state is wanted, or only KV. attention: how rows attend; by default exactly,
    over the fused KV. layers: run only so many of the first layers, for their KV; None is all.

    ``steps()`` is a generator: each step runs one block of rows through one layer, so a caller may
    do other work in between. Afterwards ``stats`` is complete and, where it was wanted, ``hidden``
    is the last token's hidden state (1, 1, hidden).
    """

    stack: DecoderStack
    token_ids: Tensor
    fused: FusedKV
    candidates: Candidates
    schedule: Schedule
    row_block: int = ROW_BLOCK
    observer: Observer | None = None
    needs_hidden: bool = True
    attention: Attention | None = None
    layers: int | None = None
    hidden: Tensor = field(init=False)
    stats: PassStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = PassStats(recomputed=torch.zeros_like(self.candidates.cached))
        self._always = ~self.candidates.cached
        if self.needs_hidden:  # the last token yields the logits
            self._always[-1] = True

    @property
    def compute_share(self) -> float:
        """Work spent, as a share of ordinary prefill of the same prompt."""
        return self.stats.work / prefill_cost(self.stack.costs, self.token_ids.numel())

    def steps(self) -> Iterator[int | None]:
        """Run the pass; yields each layer once its KV is final, and None between blocks of rows."""
        self._carry(self._first_rows())
        self.hidden = self.stack.embed(self.token_ids[self._rows][None])
        last = (self.layers or self.stack.geometry.layers) - 1
        for layer in range(last + 1):
            if layer in self.schedule.checks:
                self._check(layer, self.schedule.checks[layer])
            yield from self._finish(layer) if layer == last else self._run(layer)
            yield layer
        self.stats.recomputed |= self._mask_of(self._computed) & self.candidates.cached

    def run(self) -> None:
        """Run the pass to its end."""
        for _ in self.steps():
            pass

    def _first_rows(self) -> Tensor:
        if self.schedule.before is None:
            # What may not be recomputed keeps its cached KV in every layer, also before the check.
            return (self._always | self.candidates.eligible).nonzero()[:, 0]
        if self.schedule.before == 0:
            return self._always.nonzero()[:, 0]
        with _Timer(self.stats):
            eligible = (self.candidates.eligible & ~self._always).nonzero()[:, 0]
            scores = self.schedule.selector.score(self.candidates.evidence(eligible))
            return self._kept(eligible, scores, self.schedule.before)

    def _kept(self, candidates: Tensor, scores: Tensor, ratio: float) -> Tensor:
        """Positions to carry on: those always computed and the best candidates."""
        count = row_count(ratio, int(self.candidates.eligible.sum()))
        scores = self.stack.across_ranks(scores, "first")
        keep = self._always.clone()
        keep[candidates[top_rows(scores, count)]] = True
        return keep.nonzero()[:, 0]

    def _carry(self, rows: Tensor) -> None:
        """Make ``rows`` the rows that later layers run on."""
        self._rows = self._computed = rows
        self._blocks: list[_Block] = []
        count = -(-rows.numel() // self.row_block)
        for part in rows.tensor_split(count) if count else ():
            start = sum(block.rows.numel() for block in self._blocks)
            self._blocks.append(_Block(start, part, self.stack.at(part[None])))

    def _run(self, layer: int) -> Iterator[None]:
        for block in self._blocks:
            if block.start:
                yield
            here = slice(block.start, block.start + block.rows.numel())
            self.hidden[:, here] = self._run_block(layer, block, self.hidden[:, here])
        self.stats.work += self.stack.costs[layer].run(self._rows)

    def _run_block(self, layer: int, block: _Block, hidden: Tensor) -> Tensor:
        def attend(call: AttentionCall) -> Tensor:
            self.fused.write(layer, block.rows, call.key, call.value)
            if self.observer is not None:
                self.observer(call, block.rows, self.fused.layer(layer)[0])
            return (self.attention or attend_fused)(call, self.fused, block.rows)

        return self.stack.run_layer(layer, hidden, block.place, attend)

    def _check(self, layer: int, ratio: float) -> None:
        """Compare fresh with cached KV, keep all fresh KV of this layer, narrow the rows."""
        with _Timer(self.stats):
            calls = [call for _, call in self._probe(layer)]
            keys = torch.cat([call.key for call in calls], 2)
            values = torch.cat([call.value for call in calls], 2)
            self.stats.work += self.stack.costs[layer].probe(self._rows.numel())
            index = (self.candidates.eligible & ~self._always)[self._rows].nonzero()[:, 0]
            rows = self._rows[index]
            evidence = self.candidates.evidence(
                rows,
                fresh_keys=keys[0].index_select(1, index),
                fresh_values=values[0].index_select(1, index),
                cached_keys=self.fused.keys[layer].index_select(1, rows),
                cached_values=self.fused.values[layer].index_select(1, rows),
                total=lambda part: self.stack.across_ranks(part, "sum"),
            )
            kept = self._kept(rows, self.schedule.selector.score(evidence), ratio)
            self.fused.write(layer, self._rows, keys, values)
            self.hidden = self.hidden[:, torch.isin(self._rows, kept, assume_unique=True)]
            self._carry(kept)

    def _finish(self, layer: int) -> Iterator[None]:
        """The last layer: K and V of every row, the layer itself for the last token at most."""
        computed = self._rows
        only_last = self.needs_hidden and computed.numel() == 1
        if computed.numel() and not only_last:
            for block, call in self._probe(layer):
                if block.start:
                    yield
                self.fused.write(layer, block.rows, call.key, call.value)
                if self.observer is not None:
                    self.observer(call, block.rows, self.fused.layer(layer)[0])
            self.stats.work += self.stack.costs[layer].probe(computed.numel() - self.needs_hidden)
        if not self.needs_hidden:
            return
        self.hidden = self.hidden[:, -1:]
        observer, self.observer = self.observer, None
        self._carry(computed[-1:])
        yield from self._run(layer)
        self.observer, self._computed = observer, computed

    def _probe(self, layer: int) -> Iterator[tuple[_Block, AttentionCall]]:
        for block in self._blocks:
            here = slice(block.start, block.start + block.rows.numel())
            yield block, self.stack.probe_layer(layer, self.hidden[:, here], block.place)

    def _mask_of(self, rows: Tensor) -> Tensor:
        mask = torch.zeros_like(self._always)
        mask[rows] = True
        return mask


def attend_fused(call: AttentionCall, fused: FusedKV, rows: Tensor) -> Tensor:
    """Attend exactly, with PyTorch's attention, over the fused KV."""
    keys, values = fused.layer(call.layer)
    return attend_rows(
        call.query, keys, values, rows,
        scaling=call.scaling, window=call.window, softcap=call.softcap,
    )  # fmt: skip


@dataclass
class _Block:
    """Rows run through a layer at once: where they start among all rows, and their positions."""

    start: int
    rows: Tensor
    place: Any


class _Timer:
    """Adds the time spent inside to stats.selection_seconds."""

    def __init__(self, stats: PassStats) -> None:
        self.stats = stats

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.stats.selection_seconds += time.perf_counter() - self.started
