"""Measures which tokens the question attends to, in a question-only pass over the cached KV."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attention_mass
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.passes import BlendPass, Candidates, Graphed
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.schedule import Schedule
from cacheblend_rag.blend.selectors import Probe, make_selector
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack
from cacheblend_rag.blend.steps import Steps

REUSE_ONLY = Schedule(make_selector("none"), 0.0, {})


def probe_question(
    stack: DecoderStack,
    token_ids: Tensor,
    fused: FusedKV,
    candidates: Candidates,
    question_start: int,
    *,
    probe: Probe,
    before_layer: Callable[[int], Steps[None]] | None = None,
    graphed: Graphed | None = None,
) -> Steps[tuple[Tensor, float]]:
    """Return the attention each token gets from the question, and the work spent.

    The pass is plain reuse, so only text and missing chunks are computed; it ends after the last
    layer that ``probe`` observes. Attention is reduced over the question's tokens and over heads,
    and summed over the observed layers. Result: (tokens,) float32, on the host.

    question_start: position of the question's first token; the question ends the prompt.
    before_layer, graphed: see BlendPass.
    """
    observed = probe.observed(stack.geometry.layers)
    observer = _QuestionAttention(stack, probe, observed, question_start)
    run = BlendPass(
        stack, token_ids, fused, _with_last_token(candidates), REUSE_ONLY,
        observers=[observer], before_layer=before_layer, graphed=graphed,
        layers=observed[-1] + 1, needs_hidden=False,
    )  # fmt: skip
    yield from run.steps()
    work = observer.work + run.stats.work
    if not observer.layers:
        return torch.zeros(token_ids.numel()), work
    whole = stack.all_reduce(torch.stack(observer.layers), probe.heads)
    return whole.sum(0).cpu(), work


def _with_last_token(candidates: Candidates) -> Candidates:
    """Return candidates without cached KV of the last token, which always asks."""
    cached = candidates.cached.clone()
    cached[-1:] = False
    return replace(candidates, cached=cached)


class _QuestionAttention(Observer):
    """Collects what the question's tokens attend to in the observed layers.

    layers: (tokens,) of each, of this rank's heads. work: floating-point operations that took,
    beyond those of the pass.
    """

    def __init__(
        self, stack: DecoderStack, probe: Probe, observed: Collection[int], question_start: int
    ) -> None:
        self.layers: list[Tensor] = []
        self.work = 0.0
        self._costs, self._question_start, self._probe = stack.costs, question_start, probe
        self._observed = observed

    def watches(self, layer: int) -> bool:
        return layer in self._observed

    def attended(self, call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        first = int(np.searchsorted(rows.host, self._question_start))
        if call.layer not in self._observed or first == len(rows):
            return
        shares = attention_mass(
            call.query[:, :, first:], keys, rows.part(first, len(rows)),
            scaling=call.scaling, window=call.window, softcap=call.softcap, sinks=call.sinks,
        )  # fmt: skip
        asked = shares.sum(1)
        self.layers.append(asked.amax(0) if self._probe.heads == "max" else asked.sum(0))
        # Query by key once more, over all keys, and no values: half of what a pair costs.
        per_pair = self._costs[call.layer].per_pair / 2
        self.work += per_pair * shares.shape[1] * shares.shape[2]
