"""Prefill: from a prompt's tokens to a filled cache and first logits, blended or ordinary."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from cacheblend_rag.blend import BlendPass, FusedKV, Schedule, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.probe import REUSE_ONLY, probe_question
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.base import ChunkReport, MissReason
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.leadin import LeadIn
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prompt import ChunkSpan, EncodedPrompt

Steps = Generator[None, None, "Prefilled"]
"""Work done a layer at a time, so that other requests get their turn in between."""


@dataclass
class Prefilled:
    """A prompt's KV and what is known about how it came to be.

    logits: (1, vocabulary) float32 of the first new token.
    """

    cache: Cache
    logits: Tensor
    blended: bool = False
    reason: str | None = None
    selector: str = "none"
    ratio: float = 1.0
    chunks: list[ChunkReport] = field(default_factory=list)
    compute_share: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def nothing(cls) -> Prefilled:
        """Return what a request cancelled during prefill has to show."""
        return cls(DynamicCache(), torch.empty(1, 0), reason="cancelled", compute_share=0.0)


class Stopwatch:
    """Adds up seconds by phase; on an accelerator each reading waits for the work queued so far."""

    def __init__(self, device: torch.device, seconds: dict[str, float] | None = None) -> None:
        self.device = device
        self.seconds = {} if seconds is None else seconds
        self.skip()

    def skip(self) -> None:
        """Charge the time since the last reading to nothing."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Charge the time since the last reading to ``phase``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._add(phase, time.perf_counter() - self._last)
        self.skip()

    def move(self, seconds: float, source: str, target: str) -> None:
        """Charge some of one phase's seconds to another."""
        self._add(source, -seconds)
        self._add(target, seconds)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def ordinary_prefill(
    model: PreTrainedModel, stack: TransformersStack | None, token_ids: Sequence[int], reserve: int
) -> Steps:
    """The model's own prefill; ``stack`` is None for models that cannot be blended."""
    watch = Stopwatch(model.device)
    ids = torch.tensor([token_ids], device=model.device)
    cache: Cache = (
        DynamicCache(config=model.config)
        if stack is None
        else FusedCache(FusedKV(stack.geometry, ids.shape[1], reserve), 0)
    )
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = out.logits[:, -1].float()
    watch.lap("recompute")
    yield
    return Prefilled(cache, logits, seconds=watch.seconds)


def decode(model: PreTrainedModel, cache: Cache, token_ids: Sequence[int]) -> Tensor:
    """Run the last of ``token_ids`` on the KV of all before it; returns (1, vocabulary) float32."""
    position = torch.tensor([[len(token_ids) - 1]], device=model.device)
    newest = torch.tensor([[token_ids[-1]]], device=model.device)
    out = model(input_ids=newest, position_ids=position, past_key_values=cache, use_cache=True)
    return cast(Tensor, out.logits[:, -1].float())


class PromptChunks:
    """The chunks of one prompt and what the store holds of them."""

    def __init__(self, prompt: EncodedPrompt, lead_in: LeadIn, store: TieredKVStore) -> None:
        self.prompt, self.lead_in, self.store = prompt, lead_in, store
        self.keys = [lead_in.key(span.chunk) for span in prompt.spans]

    def __iter__(self) -> Iterator[tuple[ChunkSpan, KVKey]]:
        return zip(self.prompt.spans, self.keys, strict=True)

    def stored_tokens(self) -> int:
        """Tokens of chunks whose KV the store says it holds."""
        return sum(span.end - span.start for span, key in self if self.store.contains(key))

    def missed(self, reason: MissReason | None = None) -> list[ChunkReport]:
        """Report every chunk as a miss, for ``reason`` or else as not stored."""
        return [self.report(span, key, reason or self.absence(key)) for span, key in self]

    def absence(self, key: KVKey) -> MissReason:
        """Why the store has no such key: at all, or because its KV is another model's."""
        return "other model" if self.store.has_relative(key) else "not stored"

    @staticmethod
    def report(
        span: ChunkSpan, key: KVKey, reason: MissReason | None, tier: str | None = None
    ) -> ChunkReport:
        """Report one chunk: a hit when ``tier`` says where, otherwise a miss for ``reason``."""
        return ChunkReport(
            chunk_id=key.chunk_id,
            start=span.start,
            tokens=span.end - span.start,
            hit=tier is not None,
            reason=reason,
            tier=tier,
            document_id=span.chunk.document_id,
        )


class BlendPrefill:
    """Blended prefill of one prompt."""

    def __init__(self, stack: TransformersStack, chunks: PromptChunks, config: BlendConfig) -> None:
        self.stack, self.chunks, self.config = stack, chunks, config

    def steps(self, reserve: int) -> Steps:
        """Load, select, recompute: one chunk, then one layer, at a time."""
        watch = Stopwatch(self.stack.geometry.device)
        schedule = plan_schedule(self.config, self.stack.geometry.layers)
        ids = torch.tensor(self.chunks.prompt.token_ids, device=self.stack.geometry.device)
        fused = FusedKV(self.stack.geometry, ids.numel(), reserve)
        candidates, reports, has_prior = yield from self._load(fused, schedule)
        watch.lap("load")
        schedule, selector = self._workable(schedule, candidates, has_prior)
        probe_work = 0.0
        if schedule.selector.needs_question and schedule.before:
            candidates.question_attention, probe_work = yield from self._probe(
                ids, fused, candidates
            )
            watch.lap("selection")
        run = BlendPass(self.stack, ids, fused, candidates, schedule)
        for _ in run.steps():
            yield
        watch.lap("recompute")
        watch.move(run.stats.selection_seconds, "recompute", "selection")
        run.stats.work += probe_work
        logits = self.stack.logits(run.hidden)
        watch.lap("first_token")
        reused = any(report.hit for report in reports)
        return Prefilled(
            cache=FusedCache(fused, ids.numel()),
            logits=logits,
            blended=reused,
            reason=None if reused else "no stored chunk could be read",
            selector=selector,
            ratio=schedule.ratio,
            chunks=[_with_recomputed(report, run.stats.recomputed) for report in reports],
            compute_share=run.compute_share,
            seconds=watch.seconds,
        )

    def _load(
        self, fused: FusedKV, schedule: Schedule
    ) -> Generator[None, None, tuple[Candidates, list[ChunkReport], bool]]:
        """Lay stored chunk KV into the buffer, one chunk at a time."""
        tokens, device = fused.tokens, self.stack.geometry.device
        cached = torch.zeros(tokens, dtype=torch.bool, device=device)
        eligible, prior = cached.clone(), torch.zeros(tokens, device=device)
        offsets = torch.zeros(tokens, dtype=torch.long, device=device)
        reports: list[ChunkReport] = []
        earlier: list[str] = []
        has_prior = False
        for span, key in self.chunks:
            found = self.chunks.store.get(key)
            kv: ChunkKV | None = found.kv
            reason: MissReason | None = found.reason
            if kv is not None and not fused.fits(kv, span.end - span.start):
                kv, reason = None, "damaged"
            elif reason == "not stored":
                reason = self.chunks.absence(key)
            reports.append(self.chunks.report(span, key, reason, found.tier if kv else None))
            if kv is not None:
                fused.place(self.stack, kv, span.start)
                here = slice(span.start, span.end)
                cached[here] = True
                eligible[here] = schedule.recomputes_all or not self._protected(span, earlier)
                offsets[here] = torch.arange(kv.tokens, device=device)
                if kv.prior is not None:
                    prior[here], has_prior = kv.prior.to(device), True
            earlier.append(span.chunk.text)
            yield
        return Candidates(cached, eligible, offsets, prior), reports, has_prior

    def _protected(self, span: ChunkSpan, earlier: list[str]) -> bool:
        """Whether fresh KV would forget what this chunk's cached KV knows of its document.

        It would not where the document's earlier chunks stand right before this one, in order.
        """
        if not self.config.protect_context or self.chunks.lead_in.name != "document":
            return False
        context = [piece for piece in span.chunk.context if piece.strip()]
        return bool(context) and earlier[-len(context) :] != context

    def _workable(
        self, schedule: Schedule, candidates: Candidates, has_prior: bool
    ) -> tuple[Schedule, str]:
        """Replace a schedule that this prompt gives nothing to go by; returns it with its name."""
        name = self.config.selector
        if schedule.recomputes_all:
            return schedule, name
        if not bool(candidates.eligible.any()):
            return REUSE_ONLY, f"{name} (no token may be recomputed)"
        if schedule.selector.needs_prior and not has_prior:
            fallback = replace(self.config, selector="chunk_head", selector_options={})
            return (
                plan_schedule(fallback, self.stack.geometry.layers),
                f"chunk_head (no prior stored for {name})",
            )
        return schedule, name

    def _probe(
        self, ids: Tensor, fused: FusedKV, candidates: Candidates
    ) -> Generator[None, None, tuple[Tensor, float]]:
        question_start = max(span.end for span, _ in self.chunks)
        steps = probe_question(
            self.stack, ids, fused, candidates, min(question_start, ids.numel() - 1)
        )
        while True:
            try:
                next(steps)
            except StopIteration as done:
                mass, work = done.value
                return mass, work
            yield


def _with_recomputed(report: ChunkReport, recomputed: Tensor) -> ChunkReport:
    if not report.hit:
        return report
    part = recomputed[report.start : report.start + report.tokens]
    return replace(report, recomputed=int(part.sum()))
