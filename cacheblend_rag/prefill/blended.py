"""PromptPass: load a prompt's stored chunk KV, choose rows, recompute them, a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass, FusedKV, Schedule, plan_schedule
from cacheblend_rag.blend.passes import Attention, Candidates
from cacheblend_rag.blend.question_probe import REUSE_ONLY, probe_question
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.fetch import Fetch
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.report import ChunkReport

CONTEXT_KEPT = "nothing to recompute: the chunks know their own documents"
"""Of a blend whose every chunk is contextual: fresh KV would forget its document."""


@dataclass
class FusedPrompt:
    """A prompt's KV, and how it came to be.

    hidden: the last token's final hidden state (1, 1, hidden), None when it was not asked for.
    selector: the rule that chose rows. selector_reason: why not the one of the config, if so.
    seconds: by phase, as PhaseSeconds names them.
    """

    fused: FusedKV
    hidden: Tensor | None
    selector: str
    ratio: float
    chunks: list[ChunkReport]
    compute_share: float
    seconds: dict[str, float]
    selector_reason: str | None = None

    @property
    def blended(self) -> bool:
        """Whether any chunk could be reused."""
        return any(chunk.hit for chunk in self.chunks)


@dataclass
class PromptPass:
    """The pass over one prompt.

    token_ids: (tokens,) int64, the whole prompt. placed: its chunks, in order. fetch: their KV, on
    its way in that order; whoever began it closes it. reserve: room in the buffer for tokens
    decoded later. needs_hidden: whether the last token's hidden state is wanted.
    until: only so many of the first tokens are wanted, at least all chunks; None is all.
    attention: see BlendPass. on_layer: called with each layer whose KV is final.
    """

    stack: DecoderStack
    token_ids: Tensor
    placed: Sequence[PlacedChunk]
    fetch: Fetch
    config: BlendConfig
    reserve: int = 0
    needs_hidden: bool = True
    until: int | None = None
    attention: Attention | None = None
    on_layer: Callable[[int, FusedKV], None] | None = None
    watch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.stack.geometry.device)

    def steps(self) -> Steps[FusedPrompt]:
        """Load, select, recompute: yields after each chunk, then after each block of rows.

        The buffer is made in a step of its own: a rank that cannot have it says so before the
        others wait for it in the midst of a layer.
        """
        schedule = plan_schedule(self.config, self.stack.geometry.layers)
        fused = FusedKV(self.stack.geometry, self.token_ids.numel(), self.reserve)
        yield
        candidates, reports, has_prior = yield from self._load(fused, schedule)
        self.watch.lap("load")
        schedule, selector, selector_reason = self._workable(schedule, candidates, has_prior)
        probe_work = 0.0
        if schedule.selector.needs_question and schedule.before:
            candidates.question_attention, probe_work = yield from self._probe(fused, candidates)
            self.watch.lap("selection")
        run = BlendPass(
            self.stack,
            self.token_ids[: self.until],
            fused,
            candidates.first(self.until or self.token_ids.numel()),
            schedule,
            needs_hidden=self.needs_hidden,
            attention=self.attention,
            on_layer=self.on_layer,
        )
        yield from run.steps()
        self.watch.lap("recompute")
        self.watch.move(run.stats.selection_seconds, "recompute", "selection")
        run.stats.work += probe_work
        return FusedPrompt(
            fused=fused,
            hidden=run.hidden if self.needs_hidden else None,
            selector=selector,
            ratio=schedule.ratio,
            chunks=[_with_recomputed(report, run.stats.recomputed) for report in reports],
            compute_share=run.compute_share,
            seconds=self.watch.seconds,
            selector_reason=selector_reason,
        )

    def _load(
        self, fused: FusedKV, schedule: Schedule
    ) -> Steps[tuple[Candidates, list[ChunkReport], bool]]:
        """Lay stored chunk KV into the buffer, one chunk at a time; ranks agree on the hits."""
        found: list[tuple[ChunkReport, ChunkKV | None]] = []
        for chunk in self.placed:
            found.append(self._lay(fused, chunk))
            yield
        hits = on_all_ranks(self.stack, [kv is not None for _, kv in found])
        ranked = on_all_ranks(
            self.stack, [kv is not None and kv.prior is not None for _, kv in found]
        )
        known = Candidates.none(fused.tokens)
        known.eligible, prior = known.cached.clone(), torch.zeros(fused.tokens)
        known.prior = prior
        reports: list[ChunkReport] = []
        has_prior = False
        for chunk, (report, kv), hit, is_ranked in zip(
            self.placed, found, hits, ranked, strict=True
        ):
            if kv is None or not hit:
                reports.append(report if kv is None else chunk.report("not stored"))
                continue
            reports.append(report)
            here = slice(chunk.start, chunk.end)
            known.cached[here] = True
            known.eligible[here] = schedule.recomputes_all or not self._protects(chunk)
            known.offsets[here] = torch.arange(kv.tokens)
            if kv.prior is not None and is_ranked:
                prior[here], has_prior = kv.prior, True
        return known, reports, has_prior

    def _lay(self, fused: FusedKV, chunk: PlacedChunk) -> tuple[ChunkReport, ChunkKV | None]:
        """Lay the next chunk into the buffer, if this rank's store has it."""
        found = self.fetch.take()
        if found.kv is None:
            return chunk.report(found.reason, found.tier), None
        if not fused.fits(found.kv, chunk.end - chunk.start):
            return chunk.report("damaged"), None
        fused.place(self.stack, found.kv, chunk.start)
        return chunk.report(None, found.tier), found.kv

    def _protects(self, chunk: PlacedChunk) -> bool:
        return chunk.protected and self.config.protect_context

    def _workable(
        self, schedule: Schedule, candidates: Candidates, has_prior: bool
    ) -> tuple[Schedule, str, str | None]:
        """Replace a schedule that this prompt gives nothing to go by.

        Returns it with its selector's name, and why that is not the config's, if so.
        """
        name = self.config.selector
        if schedule.recomputes_all:
            return schedule, name, None
        if not bool(candidates.eligible.any()):
            return REUSE_ONLY, "none", CONTEXT_KEPT
        if schedule.selector.needs_prior and not has_prior:
            fallback = replace(self.config, selector="chunk_head", selector_options={})
            planned = plan_schedule(fallback, self.stack.geometry.layers)
            return planned, fallback.selector, f"no prior stored for {name}"
        return schedule, name, None

    def _probe(self, fused: FusedKV, candidates: Candidates) -> Steps[tuple[Tensor, float]]:
        question_start = max(chunk.end for chunk in self.placed)
        return probe_question(
            self.stack,
            self.token_ids,
            fused,
            candidates,
            min(question_start, self.token_ids.numel() - 1),
        )


def absent(store: TieredKVStore, chunk: PlacedChunk) -> ChunkReport:
    """Report a chunk that the store does not hold, and why."""
    found = store.absence(chunk.key)
    return chunk.report(found.reason, found.tier)


def _with_recomputed(report: ChunkReport, recomputed: Mask) -> ChunkReport:
    if not report.hit:
        return report
    part = recomputed[report.start : report.start + report.tokens]
    return replace(report, recomputed=int(part.sum()))
