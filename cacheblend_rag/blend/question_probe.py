"""Measures which tokens the question attends to, in a question-only pass over the cached KV."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attention_mass
from cacheblend_rag.blend.fused import FusedKV
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
    upper = stack.geometry.layers // 2
    masses: list[Tensor] = []
    work = 0.0

    def observe(call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        nonlocal work
        first = int(np.searchsorted(rows.host, question_start))
        if call.layer < upper or first == len(rows):
            return
        shares = attention_mass(
            call.query[:, :, first:], keys, rows.part(first, len(rows)),
            scaling=call.scaling, window=call.window, softcap=call.softcap, sinks=call.sinks,
        )  # fmt: skip
        masses.append(shares.sum(1).amax(0))
        # Query by key once more, over all keys, and no values: half of what a pair costs.
        work += stack.costs[call.layer].per_pair / 2 * shares.shape[1] * shares.shape[2]

    probe = BlendPass(
        stack, token_ids, fused, candidates, REUSE_ONLY,
        observer=observe, before_layer=before_layer,
    )  # fmt: skip
    yield from probe.steps()
    work += probe.stats.work
    if not masses:
        return torch.zeros(token_ids.numel()), work
    mass = stack.all_reduce(torch.stack(masses), "max").sum(0)
    return mass.cpu(), work
