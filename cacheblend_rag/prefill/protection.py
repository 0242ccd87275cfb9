"""Which tokens of a contextual chunk stay as stored if the prompt lacks the chunk's own document.

Recomputed KV of such a chunk forgets what the absent text says. The prior, how much the document
changed a token's key, says which tokens hold that knowledge: usually few, and none where the
document hardly changed any key. Source: this project.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.rows import Mask

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

    prior: (tokens,) float32, at least 0. share: 0 gives no token, 1 every token, whatever its
    prior. Of equal priors the first tokens are taken.
    """
    if share >= 1:
        return torch.ones_like(prior, dtype=torch.bool)
    return fewest_with(prior, share) & (prior >= LEAST_CHANGE)


def fewest_with(weights: Tensor, share: float) -> Tensor:
    """Return (tokens,) bool: the fewest tokens whose weights add up to ``share`` of all.

    weights: (tokens,), at least 0, on the host. Of equal weights the first ones are taken.
    """
    of = weights.numpy().astype(np.float64)
    order = np.argsort(-of, kind="stable")
    ordered = of[order]
    before = ordered.cumsum() - ordered
    taken = np.zeros(of.shape, dtype=np.bool_)
    taken[order] = before < share * ordered.sum()
    return torch.from_numpy(taken)


def free_tokens(tokens: int, prior: Tensor | None, share: float) -> Mask:
    """Return (tokens,) bool: which tokens of such a chunk may be recomputed.

    prior: as stored; without one nothing is known, so none may, unless nothing is protected.
    share: see ``protected_tokens``.
    """
    if prior is None:
        prior, share = torch.zeros(tokens), float(share > 0)
    free: Mask = (~protected_tokens(prior, share)).numpy()
    return free
