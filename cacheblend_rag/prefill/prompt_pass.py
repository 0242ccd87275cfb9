"""Blends a prompt in steps: chooses rows and recomputes them while its chunk KV is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass, FusedKV, RingKV, Schedule, plan_schedule
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.passes import Attention, Candidates, Graphed
from cacheblend_rag.blend.question_probe import REUSE_ONLY, probe_question
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.memory import NO_ROOM, no_room
from cacheblend_rag.prefill.chunk_loader import ChunkLoader, LoadedChunk, LostChunkError
from cacheblend_rag.prefill.controller import Controller, StoredPart
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import NOT_STORED, UNREADABLE, free_tokens, refusal
from cacheblend_rag.prefill.prefix import BLOCK_TOKENS
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.prefill.trace_recorder import TraceRecorder
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, PrefillReport
from cacheblend_rag.settings import AUTO, BlendConfig

CONTEXT_KEPT = Reason(
    ReasonCode.CONTEXT_KEPT, "nothing to recompute: the chunks know their own documents"
)
"""The reason if all chunks are contextual, since recomputing would lose their context."""
ALL_EXACT = Reason(ReasonCode.EXACT, "nothing to recompute: the reused KV is exact")
"""The reason if all that is reused goes on where earlier turns of a conversation ended."""
COMPUTING = ("lay_in", "early_layers", "recompute")
"""The phases whose seconds, less waiting, are those of a pass's work."""
FASTER_WITHOUT = Reason(ReasonCode.SLOW, "ordinary prefill is faster")
"""The reason if another rank decided to load nothing."""


@dataclass(frozen=True, kw_only=True)
class FusedPrompt(PrefillReport):
    """A prompt's KV, and the report of its pass.

    hidden: the last token's final hidden state (1, 1, hidden), None if it was not requested.
    """

    fused: FusedKV
    hidden: Tensor | None


@dataclass(frozen=True)
class HeldPrefix:
    """The KV of a prompt's first tokens, which the caller of a pass holds.

    It is exact, so it is neither moved nor recomputed. tokens: how many. place: copies one layer of
    it into the buffer.
    """

    tokens: int
    place: Callable[[int, FusedKV], None]


@dataclass
class PromptPass:
    """The pass over one prompt.

    token_ids: (tokens,) int64, the whole prompt. placed: its chunks, in order; none if only a
    prefix is reused. source: reads the KV of the prefix's blocks, then that of the chunks, in that
    order; the caller closes it. reserve: room in the buffer for tokens decoded later;
    None if no layer is needed once it is final: the buffer is a ring. needs_hidden: whether the
    last token's hidden state is needed. until: compute only so many of the first tokens, at least
    all chunks; None is all. attention, graphed: see BlendPass. on_layer: called with each layer
    whose KV is final. on_restart: called before the pass starts again because a chunk was lost.
    controller: decides by measured speeds what is loaded; without one everything is. own_seconds: a
    clock that stops while other requests run between the steps, for measuring the pass. observer:
    watches the pass; it sees the pass again from its start after a chunk was lost. lack_of_room:
    called once chunks are found; returns why memory is too short for the pass, or None.
    prefix_blocks: how many blocks of the tokens before the first chunk are read; those that are
    found stay as stored. held: the KV of the first tokens, if the caller has it; then no blocks are
    read. request_id: names it in logs.
    found: the reports of chunks by then, as if all found chunks were used.
    """

    stack: DecoderStack
    token_ids: Tensor
    placed: Sequence[PlacedChunk]
    source: LayerSource
    config: BlendConfig
    reserve: int | None = 0
    needs_hidden: bool = True
    until: int | None = None
    attention: Attention | None = None
    graphed: Graphed | None = None
    on_layer: Callable[[int, FusedKV], None] | None = None
    on_restart: Callable[[], None] | None = None
    controller: Controller | None = None
    own_seconds: Callable[[], float] = time.perf_counter
    observer: Observer | None = None
    lack_of_room: Callable[[], str | None] | None = None
    prefix_blocks: int = 0
    held: HeldPrefix | None = None
    request_id: str = ""
    found: list[ChunkReport] = field(default_factory=list, init=False)
    watch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.stack.geometry.device)
        self._began, self._own_began = time.perf_counter(), self.own_seconds()
        self._work = self._looked_up = 0.0
        self._ratio_reason: Reason | None = None

    def steps(self) -> Steps[FusedPrompt | PrefillReport]:
        """Load, select, recompute: yields after each chunk, then after each block of rows.

        Returns a report alone if the prompt is not blended: too little of it is stored, memory is
        short, or it is computed faster than loaded.

        Chunks are found first, which decides whether any is loaded. The buffer is allocated in a
        separate step, so that a rank that lacks memory fails before others wait for it within a
        layer. Layers are copied in one by one, each just before it is run. Also yields while
        waiting for a layer.
        """
        yield  # before anything is taken: the caller waits for it first
        loader = ChunkLoader(self.stack, self._placed(), self.source, self.watch)
        before = self.watch.seconds.get("look_up", 0.0)
        yield from loader.heads()
        self.watch.lap("look_up")
        self._looked_up = self.watch.seconds["look_up"] - before
        if refused := self._refused(loader):
            return replace(refused, seconds=self.watch.seconds, starts=self.watch.starts)
        yield
        loader.into(self._buffer())
        yield
        while True:
            try:
                done = yield from self._blended(loader)
            except LostChunkError:
                self.watch.enter("lay_in")
                if self.on_restart is not None:
                    self.on_restart()
            else:
                waited = self._looked_up + done.seconds.get("load", 0.0)
                done.seconds["load_hidden"] = max(0.0, self.source.busy.total - waited)
                self._measure(done)
                return done

    def _placed(self) -> list[LoadedChunk]:
        """Return the prefix's blocks, then the chunks, with their destinations."""
        ends = range(BLOCK_TOKENS, (self.prefix_blocks + 1) * BLOCK_TOKENS, BLOCK_TOKENS)
        blocks = [LoadedChunk(end - BLOCK_TOKENS, end) for end in ends]
        chunks = [LoadedChunk(p.start, p.end, len(p.before), len(p.after)) for p in self.placed]
        return blocks + chunks

    def _blocks(self, loader: ChunkLoader) -> list[LoadedChunk]:
        """Return the blocks of the prefix that are used."""
        return [block for block in loader.chunks[: self.prefix_blocks] if block.is_used]

    def _chunks(self, loader: ChunkLoader) -> Sequence[LoadedChunk]:
        return loader.chunks[self.prefix_blocks :]

    def _refused(self, loader: ChunkLoader) -> PrefillReport | None:
        """Return why the prompt is not blended, or None; the same on all ranks."""
        self.found = self._reports(loader)
        if not self.placed and not self._blocks(loader):
            return PrefillReport(NOT_STORED)
        if self.placed and (refused := refusal(self.found, self.config.min_tokens)):
            why, told = refused
            return PrefillReport(why, chunks=told)
        if self.lack_of_room is not None and (lack := self.lack_of_room()) is not None:
            told = [placed.report(NO_ROOM) for placed in self.placed]
            return PrefillReport(no_room(lack), chunks=told)
        slow = self._decide(loader)
        return PrefillReport(slow, chunks=self._reports(loader)) if slow else None

    def _decide(self, loader: ChunkLoader) -> Reason | None:
        """Choose by measured speeds what to load and recompute; returns why nothing is loaded.

        None if something is. The first rank decides for all. Blocks of a prefix are loaded like
        chunks of which nothing may be recomputed, or computed if that is faster; they are no reason
        to blend if no chunk is loaded.
        """
        found = [chunk for chunk in loader.chunks if chunk.is_used]
        if self.controller is None or not found:
            return None
        blocks = [_stored_part(block) for block in self._blocks(loader)]
        pairs = zip(self.placed, self._chunks(loader), strict=True)
        share = self.config.protect_context
        chunks = [_stored_part(chunk, p, share) for p, chunk in pairs if chunk.is_used]
        parts = blocks + chunks
        decided = self.controller.decide(
            self.token_ids.numel(), parts, self.config, held=self._held_tokens
        )
        loaded = [part in decided.load for part in parts]
        ratio, *kept = self.stack.broadcast(
            torch.tensor([decided.config.ratio, *loaded], dtype=torch.float64)
        ).tolist()
        if self.config.recompute_ratio == AUTO:
            self.config = self.config.with_ratio(ratio)
        self._ratio_reason = decided.why
        loader.leave_out([chunk for chunk, keep in zip(found, kept, strict=True) if not keep])
        is_worth = any(kept[len(blocks) :] if self.placed else kept)
        return None if is_worth else decided.why or FASTER_WITHOUT

    def _measure(self, done: FusedPrompt) -> None:
        """Record the times of reading and computing, without other requests' steps."""
        if self.controller is not None:
            own, all_ = self.own_seconds() - self._own_began, time.perf_counter() - self._began
            seconds = sum(done.seconds.get(phase, 0.0) for phase in COMPUTING)
            seconds *= own / max(all_, own, 1e-9)
            self.controller.rates.record("blend", self._work, seconds)
            for tier, (nbytes, seconds) in self.source.measured().items():
                self.controller.speeds.record(tier, nbytes, seconds)

    def _buffer(self) -> FusedKV:
        geometry, tokens = self.stack.geometry, self.token_ids.numel()
        if self.reserve is None:
            return RingKV(geometry, tokens)
        return FusedKV(geometry, tokens, self.reserve)

    def _blended(self, loader: ChunkLoader) -> Steps[FusedPrompt]:
        """Run the pass over the available chunks; raises LostChunkError."""
        schedule = plan_schedule(self.config, self.stack.geometry.layers)
        candidates, has_prior = self._candidates(loader, schedule)
        schedule, selector, selector_reason = self._workable(schedule, candidates, has_prior)
        if schedule.selector.needs_question and schedule.chooses:
            self.watch.enter("selection", waits=False)
            candidates.question_attention = yield from self._probe(loader, candidates, schedule)
            self.watch.enter("lay_in")
        recorder = None
        if self.config.trace:
            in_chunks = self._in_chunks(loader)
            recorder = TraceRecorder(self.stack, candidates, schedule, in_chunks)
        run = BlendPass(
            self.stack,
            self.token_ids[: self.until],
            loader.fused,
            candidates.first(self.until or self.token_ids.numel()),
            schedule,
            needs_hidden=self.needs_hidden,
            attention=self.attention,
            graphed=self.graphed,
            before_layer=partial(self._load, loader),
            on_layer=self.on_layer,
            selecting=self.watch.selecting,
            request_id=self.request_id,
            observers=[one for one in (recorder, self.observer) if one is not None],
        )
        is_early = min(schedule.checks, default=0) > 0
        self.watch.enter("early_layers" if is_early else "recompute", waits=False)
        try:
            yield from run.steps()
        finally:
            self._work += run.stats.work
        self.watch.enter("lay_in")
        run.stats.work = self._work
        chunks = [_with_recomputed(r, run.stats.recomputed) for r in self._reports(loader)]
        return FusedPrompt(
            fused=loader.fused,
            hidden=run.hidden if self.needs_hidden else None,
            reason=None if any(chunk.hit for chunk in chunks) else UNREADABLE,
            selector=selector,
            ratio=schedule.ratio,
            chunks=chunks,
            compute_share=run.compute_share,
            seconds=self.watch.seconds,
            starts=self.watch.starts,
            selector_reason=selector_reason,
            ratio_reason=self._ratio_reason,
            trace=None if recorder is None else recorder.trace(),
            prefix_tokens=self._held_tokens + len(self._blocks(loader)) * BLOCK_TOKENS,
            load_by_tier=self.watch.load_by_tier,
        )

    @property
    def _held_tokens(self) -> int:
        return 0 if self.held is None else self.held.tokens

    def _load(self, loader: ChunkLoader, layer: int) -> Steps[None]:
        """Copy one layer of all cached KV into the buffer; raises LostChunkError."""
        yield from loader.load(layer)
        if self.held is not None:
            with self.watch.laying():
                self.held.place(layer, loader.fused)

    def _reports(self, loader: ChunkLoader) -> list[ChunkReport]:
        pairs = zip(self.placed, self._chunks(loader), strict=True)
        return [_report(placed, chunk) for placed, chunk in pairs]

    def _candidates(self, loader: ChunkLoader, schedule: Schedule) -> tuple[Candidates, bool]:
        """Return the candidates among the prompt's tokens, and whether any has a prior."""
        chunks = self._chunks(loader)
        priors = [chunk.head.prior if chunk.head else None for chunk in chunks]
        ranked = on_all_ranks(self.stack, [prior is not None for prior in priors])
        known = Candidates.none(self.token_ids.numel())
        known.eligible, scores = known.cached.clone(), torch.zeros(self.token_ids.numel())
        known.prior, has_prior = scores, False
        known.cached[: self._held_tokens] = True
        for block in self._blocks(loader):
            known.cached[block.start : block.end] = True
        found = zip(self.placed, chunks, priors, ranked, strict=True)
        for placed, chunk, prior, is_ranked in found:
            if not chunk.is_used:
                continue
            here = slice(chunk.start, chunk.end)
            known.cached[here] = True
            known.offsets[here] = torch.arange(chunk.own.start, chunk.own.stop)
            usable = prior[chunk.own] if prior is not None and is_ranked else None
            if usable is not None:
                scores[here], has_prior = usable, True
            known.eligible[here] = True
            if placed.is_exact:
                known.eligible[here] = False
            elif placed.protected and not schedule.recomputes_all:
                free = free_tokens(chunk.end - chunk.start, usable, self.config.protect_context)
                known.eligible[here] = torch.from_numpy(free)
        return known, has_prior

    def _in_chunks(self, loader: ChunkLoader) -> Mask:
        """Return (tokens,) bool: the tokens of chunks that are used."""
        found = np.zeros(self.token_ids.numel(), dtype=np.bool_)
        for chunk in self._chunks(loader):
            if chunk.is_used:
                found[chunk.start : chunk.end] = True
        return found

    def _workable(
        self, schedule: Schedule, candidates: Candidates, has_prior: bool
    ) -> tuple[Schedule, str, Reason | None]:
        """Replace a schedule whose selector lacks its input in this prompt.

        Returns the schedule, its selector's name, and why that is not the config's, if so.
        """
        name = self.config.selector
        if schedule.recomputes_all:
            return schedule, name, None
        if not bool(candidates.eligible.any()):
            is_exact = all(placed.is_exact for placed in self.placed)
            return REUSE_ONLY, "none", ALL_EXACT if is_exact else CONTEXT_KEPT
        if schedule.selector.needs_prior and not has_prior:
            fallback = self.config.with_changes(selector="chunk_head", selector_options={})
            planned = plan_schedule(fallback, self.stack.geometry.layers)
            why = Reason(ReasonCode.NO_PRIOR, f"no prior stored for {name}")
            return planned, fallback.selector, why
        return schedule, name, None

    @property
    def _question_start(self) -> int:
        """Position of the first token after the chunks, or of the last token."""
        after = max((chunk.end + len(chunk.after) for chunk in self.placed), default=0)
        return min(after, self.token_ids.numel() - 1)

    def _probe(
        self, loader: ChunkLoader, candidates: Candidates, schedule: Schedule
    ) -> Steps[Tensor]:
        attention, work = yield from probe_question(
            self.stack,
            self.token_ids,
            loader.fused,
            candidates,
            self._question_start,
            probe=schedule.selector.probe,
            before_layer=partial(self._load, loader),
            graphed=self.graphed,
        )
        self._work += work
        if not loader.fused.keeps_layers:
            loader.rewind()
        return attention


def _stored_part(
    chunk: LoadedChunk, placed: PlacedChunk | None = None, share: float = 1.0
) -> StoredPart:
    """Return a chunk's size and tier for the controller; chunks in memory need no reading.

    placed: None for a block of a prefix, of which nothing is recomputed, as of other exact KV.
    share: see ``protected_tokens``.
    """
    head, tokens, protected = chunk.head, chunk.end - chunk.start, 0
    if placed is None or placed.is_exact:
        protected = tokens
    elif placed.protected:
        prior = None if head is None or head.prior is None else head.prior[chunk.own]
        protected = tokens - int(free_tokens(tokens, prior, share).sum())
    nbytes = 0 if head is None else head.layers * head.layer_bytes
    is_chunk = placed is not None
    return StoredPart(chunk.start, chunk.end, chunk.tier or "", nbytes, protected, is_chunk)


def _report(placed: PlacedChunk, chunk: LoadedChunk) -> ChunkReport:
    """Return a chunk's report; a chunk that only other ranks lack is not stored."""
    if chunk.is_used or chunk.reason:
        return placed.report(chunk.reason, chunk.tier)
    return placed.report("not stored")


def _with_recomputed(report: ChunkReport, recomputed: Mask) -> ChunkReport:
    if not report.hit:
        return report
    part = recomputed[report.start : report.start + report.tokens]
    return replace(report, recomputed=int(part.sum()))
