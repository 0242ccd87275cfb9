"""Measures which tokens the question attends to, in a question-only pass over the cached KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attention_mass
from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.passes import BlendPass, Candidates, Graphed
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.schedule import REUSE_ONLY
from cacheblend_rag.blend.selectors import Question
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack
from cacheblend_rag.blend.steps import Steps


def probe_question(
    stack: DecoderStack,
    token_ids: Tensor,
    fused: FusedKV,
    candidates: Candidates,
    question_start: int,
    *,
    question: Question,
    before_layer: Callable[[int], Steps[None]] | None = None,
    graphed: Graphed | None = None,
) -> Steps[tuple[Tensor, float]]:
    """Return the attention each token gets from the question, and the work spent.

    The pass is plain reuse, so only text and missing chunks are computed; it ends after the last
    layer that ``question`` observes. Attention is the mean over the question's tokens, to which
    that over its ``closing`` tokens is added; it is reduced over heads, and summed over the
    observed layers. Result: (tokens,) float32, on the host.

    question_start: position of the question's first token; the question ends the prompt.
    before_layer, graphed: see BlendPass.
    """
    observed = question.observed(stack.geometry.layers)
    count = token_ids.numel() - question_start
    weights = torch.full((count,), 1 / count, device=stack.geometry.device)
    closing = min(question.closing, count)
    weights[count - closing :] += 1 / max(closing, 1)
    observer = _QuestionAttention(stack.costs, question, observed, question_start, weights)
    cached = candidates.cached.clone()
    cached[-1:] = False  # the last token asks in any case
    run = BlendPass(
        stack, token_ids, fused, replace(candidates, cached=cached), REUSE_ONLY,
        observer=observer, before_layer=before_layer, graphed=graphed,
        layers=observed[-1] + 1, last=0,
    )  # fmt: skip
    yield from run.steps()
    by_layer = torch.stack([heads.amax(0) for heads in observer.asked.values()])
    whole = stack.all_reduce(by_layer, question.heads)
    return whole.sum(0).cpu(), observer.work + run.work


@dataclass
class _QuestionAttention(Observer):
    """Collects what the question's tokens attend to in the observed layers.

    costs: of each layer. weights: of the question's tokens, (question,) float32. asked: by layer,
    (heads, tokens) of this rank's heads, or their sum (1, tokens). work: floating-point operations
    that took, beyond those of the pass.
    """

    costs: Sequence[LayerCost]
    question: Question
    observed: tuple[int, ...]
    question_start: int
    weights: Tensor
    asked: dict[int, Tensor] = field(default_factory=dict)
    work: float = 0.0

    def watches(self, layer: int) -> bool:
        return layer in self.observed

    def attended(self, call: AttentionCall, rows: Rows, fused: FusedKV) -> None:
        first, end = int(np.searchsorted(rows.host, self.question_start)), len(rows)
        if call.layer not in self.observed or first == end:
            return
        keys = fused.layer(call.layer)[0]
        shares = attention_mass(call.part(first, end), keys, rows.part(first, end))
        # Query by key once more, over all keys, and no values: half of what a pair costs.
        self.work += self.costs[call.layer].per_pair / 2 * shares.shape[1] * shares.shape[2]
        asking = rows.part(first, end).device - self.question_start
        asked = shares.mul_(self.weights[asking, None]).sum(1)
        if self.question.heads == "sum":
            asked = asked.sum(0, keepdim=True)
        # A question's rows may be in several blocks.
        self.asked[call.layer] = asked + self.asked.get(call.layer, 0)
