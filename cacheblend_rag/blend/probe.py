"""What the question attends to: a question-only probe pass over the cached KV."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attention_mass
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import ROW_BLOCK, BlendPass, Candidates
from cacheblend_rag.blend.selection import Schedule
from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack

REUSE_ONLY = Schedule(make_selector("none"), 0.0, {})


def probe_question(
    stack: DecoderStack,
    token_ids: Tensor,
    fused: FusedKV,
    candidates: Candidates,
    question_start: int,
    *,
    row_block: int = ROW_BLOCK,
) -> Generator[int | None, None, tuple[Tensor, float]]:
    """Return the attention each token gets from the question, and the work that took.

    The pass is plain reuse, so only text and missing chunks are computed. Attention is summed over
    the question's tokens, its maximum taken over heads, and summed over the upper half of the
    layers, where a question has found what it asks for. Result: (tokens,) float32.

    question_start: position of the question's first token; the question ends the prompt.
    row_block: see BlendPass.
    """
    upper = stack.geometry.layers // 2
    masses: list[Tensor] = []

    def observe(call: AttentionCall, rows: Tensor, keys: Tensor) -> None:
        asking = rows >= question_start
        if call.layer < upper or not bool(asking.any()):
            return
        shares = attention_mass(
            call.query[:, :, asking], keys, rows[asking],
            scaling=call.scaling, window=call.window, softcap=call.softcap,
        )  # fmt: skip
        masses.append(shares.sum(1).amax(0))

    probe = BlendPass(stack, token_ids, fused, candidates, REUSE_ONLY, row_block, observe)
    yield from probe.steps()
    mass = torch.zeros(token_ids.numel(), device=token_ids.device)
    if masses:
        for part in stack.across_ranks(torch.stack(masses), "max"):
            mass.add_(part)
    return mass, probe.stats.work
