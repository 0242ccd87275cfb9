"""Blends a prompt in steps: chooses rows and recomputes them while its chunk KV is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass, FusedKV, Schedule, plan_schedule
from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.passes import Attention, Candidates, Graphed
from cacheblend_rag.blend.question_probe import probe_question
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.schedule import REUSE_ONLY
from cacheblend_rag.blend.selectors import Question
from cacheblend_rag.blend.stack import DecoderStack, Geometry
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.memory import no_room
from cacheblend_rag.prefill.chunk_loader import ChunkLoader, LostChunkError
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import NOT_STORED, UNREADABLE, Controller, refusal
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.prefill.trace_recorder import TraceRecorder
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, PrefillReport
from cacheblend_rag.settings import BlendConfig

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


class Destination:
    """Keeps the KV of a prompt that a pass computes, in one buffer of all layers.

    A subclass may take each layer elsewhere once it is final, and then keep fewer layers.

    reserve: room in the buffer for tokens decoded later. needs_hidden: whether the last token's
    hidden state is needed. until: compute only so many of the first tokens, at least all chunks;
    None is all. attention, graphed: see BlendPass.

    held_tokens: how many of the first tokens have KV here already. It is exact, so it is neither
    moved nor recomputed.
    """

    def __init__(
        self,
        reserve: int = 0,
        *,
        needs_hidden: bool = True,
        until: int | None = None,
        attention: Attention | None = None,
        graphed: Graphed | None = None,
    ) -> None:
        self.needs_hidden, self.until = needs_hidden, until
        self.attention, self.graphed = attention, graphed
        self.held_tokens = 0
        self._reserve = reserve

    def buffer(self, geometry: Geometry, tokens: int) -> FusedKV:
        """Return the buffer of the pass."""
        return FusedKV(geometry, tokens, self._reserve)

    def place_held(self, layer: int, fused: FusedKV) -> None:
        """Copy one layer of the held tokens' KV into the buffer."""

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        """Take a layer whose KV is final; again if the pass starts again, since a chunk is lost."""


class PromptPass:
    """The pass over one prompt.

    token_ids: (tokens,) int64, the whole prompt. placed: what of it may be stored, in order: blocks
    of its prefix, which stay as stored, then its chunks; no chunk if only a prefix is reused.
    source: reads their KV, in that order; the caller closes it. controller: decides by measured
    speeds what is loaded; without one everything is. lack_of_room: called once chunks are found;
    returns why memory is too short for the pass, or None. request_id: names it in logs.

    found: the reports of chunks by then, as if all found chunks were used. watch: its phases.
    """

    def __init__(
        self,
        stack: DecoderStack,
        token_ids: Tensor,
        placed: Sequence[PlacedChunk],
        source: LayerSource,
        config: BlendConfig,
        *,
        destination: Destination | None = None,
        controller: Controller | None = None,
        lack_of_room: Callable[[], str | None] | None = None,
        request_id: str = "",
    ) -> None:
        self.stack, self.token_ids, self.config = stack, token_ids, config
        self.destination = destination or Destination()
        self.watch = Stopwatch(stack.geometry.device)
        self.found: list[ChunkReport] = []
        self._loader = ChunkLoader(stack, placed, source, self.watch)
        self._chunks = [one for one in self._loader.chunks if not one.placed.is_block]
        self._controller, self._lack_of_room = controller, lack_of_room
        self._request_id = request_id
        self._began = time.perf_counter()
        self._own_began = 0.0 if controller is None else controller.clock()
        self._work = 0.0
        self._ratio_reason: Reason | None = None

    def steps(self) -> Steps[FusedPrompt | PrefillReport]:
        """Load, select, recompute: yields after each chunk, then after each block of rows.

        Returns a report alone if the prompt is not blended: too little of it is stored, memory is
        short, or it is computed faster than loaded.

        Chunks are found first, which decides whether any is loaded. The buffer is allocated in a
        separate step, so that a rank that lacks memory fails before others wait for it within a
        layer. Layers are copied in one by one, each just before it is run. Also yields while
        waiting for a layer. A chunk that is lost meanwhile is a miss: all is computed again, on all
        ranks.
        """
        yield  # before anything is taken: the caller waits for it first
        looked_up = -self.watch.seconds.get("look_up", 0.0)
        yield from self._loader.find()
        self.watch.lap("look_up")
        looked_up += self.watch.seconds["look_up"]
        if refused := self._refused():
            return replace(refused, seconds=self.watch.seconds, starts=self.watch.starts)
        yield
        self._loader.into(self.destination.buffer(self.stack.geometry, self.token_ids.numel()))
        yield
        while True:
            try:
                done = yield from self._blended()
                break
            except LostChunkError:
                self.watch.enter("lay_in")
        waited = looked_up + done.seconds.get("load", 0.0)
        done.seconds["load_hidden"] = max(0.0, self._loader.source.busy.total - waited)
        self._measure(done)
        return done

    # What is loaded

    def _refused(self) -> PrefillReport | None:
        """Return why the prompt is not blended, or None; the same on all ranks."""
        self.found = self._reports()
        if not self._chunks and not self._loader.used:
            return PrefillReport(NOT_STORED)
        if self._chunks and (refused := refusal(self.found, self.config.min_tokens)):
            why, told = refused
            return PrefillReport(why, chunks=told)
        if self._lack_of_room is not None and (lack := self._lack_of_room()) is not None:
            told = [chunk.placed.report(Miss.NO_ROOM) for chunk in self._chunks]
            return PrefillReport(no_room(lack), chunks=told)
        slow = self._decide()
        return PrefillReport(slow, chunks=self._reports()) if slow else None

    def _decide(self) -> Reason | None:
        """Choose by measured speeds what to load; returns why nothing is loaded.

        None if something is. The first rank decides for all. Blocks of a prefix are loaded like
        chunks of which nothing may be recomputed, or computed if that is faster; they are no reason
        to blend if no chunk is loaded.
        """
        found = self._loader.used
        if self._controller is None or not found:
            return None
        parts = [chunk.stored_part(self.config.protect_context) for chunk in found]
        decided = self._controller.decide(
            self.token_ids.numel(), parts, self.config, held=self.destination.held_tokens
        )
        load = set(decided.load)
        kept = self.stack.broadcast(torch.tensor([part in load for part in parts])).tolist()
        self._ratio_reason = decided.why
        slow = [chunk for chunk, keep in zip(found, kept, strict=True) if not keep]
        self._loader.leave_out(slow, Miss.SLOW)
        is_worth = any(chunk.is_used for chunk in self._chunks or found)
        return None if is_worth else decided.why or FASTER_WITHOUT

    def _measure(self, done: FusedPrompt) -> None:
        """Record the times of reading and computing, without other requests' steps."""
        if self._controller is None:
            return
        own, all_ = self._controller.clock() - self._own_began, time.perf_counter() - self._began
        seconds = sum(done.seconds.get(phase, 0.0) for phase in COMPUTING)
        seconds *= own / max(all_, own, 1e-9)
        self._controller.learn(self._work, seconds, self._loader.source.measured())

    # The pass itself

    def _blended(self) -> Steps[FusedPrompt]:
        """Run the pass over the available chunks; raises LostChunkError."""
        schedule = plan_schedule(self.config, self.stack.geometry.layers)
        candidates = self._candidates(schedule)
        schedule, selector, selector_reason = self._workable(schedule, candidates)
        if isinstance(schedule.selector, Question) and 0 < schedule.ratio < 1:
            self.watch.enter("selection", waits=False)
            candidates.question_attention = yield from self._probe(candidates, schedule.selector)
            self.watch.enter("lay_in")
        recorder = None
        if self.config.trace:
            recorder = TraceRecorder(self.stack, candidates, schedule, self._in_chunks())
        to = self.destination
        run = BlendPass(
            self.stack,
            self.token_ids[: to.until],
            self._loader.fused,
            candidates.first(to.until or self.token_ids.numel()),
            schedule,
            last=int(to.needs_hidden),
            attention=to.attention,
            graphed=to.graphed,
            before_layer=self._load,
            on_layer=to.finish_layer,
            selecting=self.watch.selecting,
            request_id=self._request_id,
            observer=recorder or Observer(),
        )
        is_early = min(schedule.checks, default=0) > 0
        self.watch.enter("early_layers" if is_early else "recompute", waits=False)
        try:
            yield from run.steps()
        finally:
            self._work += run.work
        self.watch.enter("lay_in")
        chunks = [_with_recomputed(report, run.recomputed) for report in self._reports()]
        blocks = sum(chunk.placed.tokens for chunk in self._loader.used if chunk.placed.is_block)
        return FusedPrompt(
            fused=self._loader.fused,
            hidden=run.hidden if to.needs_hidden else None,
            reason=None if any(chunk.hit for chunk in chunks) else UNREADABLE,
            selector=selector,
            ratio=schedule.ratio,
            chunks=chunks,
            compute_share=self._work / prefill_cost(self.stack.costs, run.token_ids.numel()),
            seconds=self.watch.seconds,
            starts=self.watch.starts,
            selector_reason=selector_reason,
            ratio_reason=self._ratio_reason,
            trace=None if recorder is None else recorder.trace(),
            prefix_tokens=to.held_tokens + blocks,
            early_kv_bytes=self._probed_bytes(schedule),
            load_by_tier=self.watch.load_by_tier,
        )

    def _probed_bytes(self, schedule: Schedule) -> int:
        """Return how many bytes of chunk KV, in the model's dtype, are needed before layer 0."""
        geometry, tokens = self.stack.geometry, sum(one.placed.tokens for one in self._loader.used)
        layers = geometry.layers
        return FusedKV.bytes_for(geometry, tokens) * schedule.probed(layers) // layers

    def _load(self, layer: int) -> Steps[None]:
        """Copy one layer of all cached KV into the buffer; raises LostChunkError."""
        yield from self._loader.load(layer)
        if self.destination.held_tokens:
            with self.watch.laying():
                self.destination.place_held(layer, self._loader.fused)

    def _reports(self) -> list[ChunkReport]:
        return [chunk.report() for chunk in self._chunks]

    def _candidates(self, schedule: Schedule) -> Candidates:
        """Return the candidates among the prompt's tokens."""
        share = 0.0 if schedule.ratio == 1 else self.config.protect_context
        known = Candidates.none(self.token_ids.numel())
        known.prior = torch.zeros(self.token_ids.numel())
        known.cached[: self.destination.held_tokens] = True
        for chunk in self._loader.used:
            known.cached[chunk.here] = True
            known.offsets[chunk.here] = torch.arange(chunk.own.start, chunk.own.stop)
            known.eligible[chunk.here] = torch.from_numpy(chunk.free(share))
            if chunk.prior is not None:
                known.prior[chunk.here] = chunk.prior
        return known

    def _in_chunks(self) -> Mask:
        """Return (tokens,) bool: the tokens of chunks that are used."""
        found = np.zeros(self.token_ids.numel(), dtype=np.bool_)
        for chunk in self._chunks:
            found[chunk.here] = chunk.is_used
        return found

    def _workable(
        self, schedule: Schedule, candidates: Candidates
    ) -> tuple[Schedule, str, Reason | None]:
        """Replace a schedule whose selector lacks its input in this prompt.

        Returns the schedule, its selector's name, and why that is not the config's, if so.
        """
        name = self.config.selector
        has_prior = any(chunk.prior is not None for chunk in self._loader.used)
        if schedule.ratio == 1:
            return schedule, name, None
        if not bool(candidates.eligible.any()):
            is_exact = all(chunk.placed.is_exact for chunk in self._chunks)
            return REUSE_ONLY, "none", ALL_EXACT if is_exact else CONTEXT_KEPT
        if schedule.selector.needs_prior and not has_prior:
            fallback = self.config.with_selector("chunk_head")
            planned = plan_schedule(fallback, self.stack.geometry.layers)
            why = Reason(ReasonCode.NO_PRIOR, f"no prior stored for {name}")
            return planned, fallback.selector, why
        return schedule, name, None

    def _probe(self, candidates: Candidates, question: Question) -> Steps[Tensor]:
        """Return the attention of what follows the chunks, or of the last token: the question."""
        ends = (chunk.here.stop + chunk.placed.after for chunk in self._chunks)
        question_start = min(max(ends, default=0), self.token_ids.numel() - 1)
        attention, work = yield from probe_question(
            self.stack,
            self.token_ids,
            self._loader.fused,
            candidates,
            question_start,
            question=question,
            before_layer=self._load,
            graphed=self.destination.graphed,
        )
        self._work += work
        if not self._loader.fused.keeps_layers:
            self._loader.rewind()
        return attention


def _with_recomputed(report: ChunkReport, recomputed: Mask) -> ChunkReport:
    if not report.hit:
        return report
    part = recomputed[report.start : report.start + report.tokens]
    return replace(report, recomputed=int(part.sum()))
