"""Rules of a blend: which prompts have too little to reuse, and which tokens stay as stored.

Recomputed KV of a contextual chunk forgets what the chunk's own document says, if the prompt lacks
it. The prior, how much the document changed a token's key, says which tokens hold that knowledge:
usually few, and none where the document hardly changed any key. Source: this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.kv.fetch import Threshold
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import ChunkReport, MissReason
from cacheblend_rag.settings import BlendConfig

NO_CHUNK = Reason(ReasonCode.NO_CHUNK, "no known chunk in the prompt")
NOT_STORED = Reason(ReasonCode.NOT_STORED, "no chunk of the prompt is stored")
UNREADABLE = Reason(ReasonCode.UNREADABLE, "no stored chunk could be read")
LEAST_SHARE = 1 / 8
"""Smallest share of a prompt that exact KV must have to be reused by itself: below it, the overhead
of a blend pass may exceed the computation saved."""


def config_for(config: BlendConfig, parts: Sequence[PlacedChunk], tokens: int) -> BlendConfig:
    """Return a request's config, without ``min_tokens`` if all that can be reused is exact.

    It must be enough to be worth a pass all the same, as a stored prefix must. parts: what can be
    reused. tokens: of the whole prompt.
    """
    held = sum(part.end - part.start for part in parts)
    is_exact = bool(parts) and all(part.is_exact for part in parts)
    is_enough = held >= max(1, LEAST_SHARE * tokens)
    return config.with_changes(min_tokens=0) if is_exact and is_enough else config


def threshold(placed: Sequence[PlacedChunk], least: int) -> Threshold:
    """Return how much of a prompt must be found before its layers are read; least: min_tokens."""
    return Threshold([chunk.end - chunk.start for chunk in placed], least)


def refusal(found: Sequence[ChunkReport], least: int) -> tuple[Reason, list[ChunkReport]] | None:
    """Decide by the found chunks of a prompt, before any layer is read.

    found: reports as if all found chunks were used. least: ``min_tokens``. Returns why the prompt
    is not blended, and the reports of its chunks; None if it is blended.
    """
    refused = too_little(sum(chunk.tokens for chunk in found if chunk.hit), least)
    if refused is None:
        return None
    reason, miss = refused
    if miss is None and any(chunk.reason not in ("not stored", "other model") for chunk in found):
        reason = UNREADABLE
    return reason, missed(found, miss) if miss else list(found)


def missed(found: Sequence[ChunkReport], reason: MissReason) -> list[ChunkReport]:
    """Report the found chunks as missed for ``reason``, the others unchanged."""
    return [
        replace(chunk, hit=False, reason=reason, tier=None) if chunk.hit else chunk
        for chunk in found
    ]


def too_little(reusable: int, least: int) -> tuple[Reason, MissReason | None] | None:
    """Return why so few tokens are not worth blending, and the miss reason of their chunks.

    reusable: tokens of chunks that are stored. least: ``min_tokens``. None if blending is worth it;
    without a miss reason the store gives it.
    """
    if reusable == 0:
        return NOT_STORED, None
    if reusable < least:
        why = f"{reusable} reusable tokens are fewer than min_tokens={least}"
        return Reason(ReasonCode.TOO_SHORT, why), "too short"
    return None


LEAST_CHANGE = 0.25
"""The smallest prior of a protected token: below it, KV hardly depends on the document.

Measured on fragments: on a model of 1.1M parameters, which looks subjects up in its first
layers, nearly all priors are above it, and recomputed chunks forget their subject; on SmolLM2 and
Gemma 3 all are below it, and recomputing any of their tokens brings predictions nearer to those
after the whole documents.
"""


def protected_tokens(prior: Tensor, share: float) -> Tensor:
    """Return (tokens,) bool: of the fewest tokens that hold ``share`` of a chunk's prior, those
    with a prior of at least LEAST_CHANGE.

    prior: (tokens,) float32, at least 0, on the host. share: 0 gives no token, 1 every token,
    whatever its prior. Of equal priors the first tokens are taken.
    """
    if share >= 1:
        return torch.ones_like(prior, dtype=torch.bool)
    of = prior.numpy().astype(np.float64)
    order = np.argsort(-of, kind="stable")
    ordered = of[order]
    before = ordered.cumsum() - ordered
    taken = np.zeros(of.shape, dtype=np.bool_)
    taken[order] = before < share * ordered.sum()
    return torch.from_numpy(taken) & (prior >= LEAST_CHANGE)


def free_tokens(tokens: int, prior: Tensor | None, share: float) -> Mask:
    """Return (tokens,) bool: which tokens of such a chunk may be recomputed.

    prior: as stored; without one nothing is known, so none may, unless nothing is protected.
    share: see ``protected_tokens``.
    """
    if prior is None:
        prior, share = torch.zeros(tokens), float(share > 0)
    free: Mask = (~protected_tokens(prior, share)).numpy()
    return free
