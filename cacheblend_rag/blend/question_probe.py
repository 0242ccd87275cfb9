"""Measures which tokens the question attends to, in a question-only pass over the cached KV."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attention_mass
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.passes import BlendPass, Candidates
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.schedule import Schedule
from cacheblend_rag.blend.selectors import make_selector
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
    before_layer: Callable[[int], Steps[None]] | None = None,
) -> Steps[tuple[Tensor, float]]:
    """Return the attention each token gets from the question, and the work spent.

    The pass is plain reuse, so only text and missing chunks are computed. Attention is summed over
    the question's tokens, its maximum taken over heads, and summed over the upper half of the
    layers, where a question has found what it asks for. Result: (tokens,) float32, on the host.

    question_start: position of the question's first token; the question ends the prompt.
    before_layer: see BlendPass.
    """
    observer = _AttentionMass(stack, question_start)
    probe = BlendPass(
        stack, token_ids, fused, candidates, REUSE_ONLY,
        observers=[observer], before_layer=before_layer,
    )  # fmt: skip
    yield from probe.steps()
    work = observer.work + probe.stats.work
    if not observer.masses:
        return torch.zeros(token_ids.numel()), work
    mass = stack.all_reduce(torch.stack(observer.masses), "max").sum(0)
    return mass.cpu(), work


class _AttentionMass(Observer):
    """Sums up what the question's tokens attend to, in the upper half of the layers.

    masses: (tokens,) of each layer. work: floating-point operations that took.
    """

    def __init__(self, stack: DecoderStack, question_start: int) -> None:
        self.masses: list[Tensor] = []
        self.work = 0.0
        self._costs, self._question_start = stack.costs, question_start
        self._upper = stack.geometry.layers // 2

    def attended(self, call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        first = int(np.searchsorted(rows.host, self._question_start))
        if call.layer < self._upper or first == len(rows):
            return
        shares = attention_mass(
            call.query[:, :, first:], keys, rows.part(first, len(rows)),
            scaling=call.scaling, window=call.window, softcap=call.softcap, sinks=call.sinks,
        )  # fmt: skip
        self.masses.append(shares.sum(1).amax(0))
        # Query by key once more, over all keys, and no values: half of what a pair costs.
        per_pair = self._costs[call.layer].per_pair / 2
        self.work += per_pair * shares.shape[1] * shares.shape[2]
