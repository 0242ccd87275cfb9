"""Prefill: from a prompt's tokens to a filled cache and first logits, blended or ordinary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.ordinary import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.kv.fetch import Fetch
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.blended import PromptPass, Stopwatch, absence
from cacheblend_rag.prefill.lead_in import LeadIn, place_chunks
from cacheblend_rag.report import ChunkReport, MissReason
from cacheblend_rag.text.prompt import EncodedPrompt


@dataclass
class Prefilled:
    """A prompt's KV and what is known about how it came to be.

    cache: None where the model keeps nothing. logits: (1, vocabulary) float32 of the first new
    token.
    """

    cache: Cache | None
    logits: Tensor
    blended: bool = False
    reason: str | None = None
    selector: str = "none"
    ratio: float = 1.0
    chunks: list[ChunkReport] = field(default_factory=list)
    compute_share: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)
    selector_reason: str | None = None

    @classmethod
    def nothing(cls) -> Prefilled:
        """Return what a request cancelled during prefill has to show."""
        return cls(None, torch.empty(1, 0), reason="cancelled", compute_share=0.0)


def ordinary_prefill(
    ordinary: OrdinaryPrefill, token_ids: Sequence[int], reserve: int
) -> Steps[Prefilled]:
    """The model's own prefill."""
    watch = Stopwatch(ordinary.model.device)
    cache, logits = ordinary.prefill(token_ids, reserve)
    watch.lap("recompute")
    yield
    return Prefilled(cache, logits, seconds=watch.seconds)


class PromptChunks:
    """The chunks of one prompt and what the store holds of them."""

    def __init__(self, prompt: EncodedPrompt, lead_in: LeadIn, store: TieredKVStore) -> None:
        self.prompt, self.store = prompt, store
        self.placed = place_chunks(prompt.spans, lead_in)

    def stored_tokens(self) -> int:
        """Tokens of chunks whose KV the store says it holds."""
        held = self.store.contains_many(c.key for c in self.placed)
        return sum(c.end - c.start for c, there in zip(self.placed, held, strict=True) if there)

    def fetch(self) -> Fetch:
        """Begin to read all of them; whoever asks closes it."""
        return self.store.fetch(c.key for c in self.placed)

    def missed(self, reason: MissReason | None = None) -> list[ChunkReport]:
        """Report every chunk as a miss, for ``reason`` or else as not stored."""
        return [chunk.report(reason or absence(self.store, chunk.key)) for chunk in self.placed]


def blended_prefill(
    stack: TransformersStack, chunks: PromptChunks, fetch: Fetch, config: BlendConfig, reserve: int
) -> Steps[Prefilled]:
    """Load, select, recompute: one chunk, then one block of rows in one layer, at a time."""
    ids = torch.tensor(chunks.prompt.token_ids, device=stack.geometry.device)
    work = PromptPass(stack, ids, chunks.placed, fetch, config, reserve)
    done = yield from work.steps()
    logits = stack.logits(cast(Tensor, done.hidden))
    work.watch.lap("first_token")
    return Prefilled(
        cache=FusedCache(done.fused, ids.numel()),
        logits=logits,
        blended=done.blended,
        reason=None if done.blended else "no stored chunk could be read",
        selector=done.selector,
        ratio=done.ratio,
        chunks=done.chunks,
        compute_share=done.compute_share,
        seconds=done.seconds,
        selector_reason=done.selector_reason,
    )
