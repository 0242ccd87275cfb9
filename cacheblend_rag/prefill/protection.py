"""Which tokens of a contextual chunk stay as stored if the prompt lacks the chunk's own document.

Recomputed KV of such a chunk forgets what the absent text says. The prior, how much the document
changed a token's key, says which tokens hold that knowledge: usually few. Source: this project.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.blend.budget import fewest_with
from cacheblend_rag.blend.rows import Mask


def protected_tokens(prior: Tensor, share: float) -> Tensor:
    """Return (tokens,) bool: the fewest tokens that hold ``share`` of a chunk's prior.

    prior: (tokens,) float32, at least 0. share: 0 gives no token, 1 every token, also those whose
    prior is 0. Of equal priors the first tokens are taken.
    """
    return torch.ones_like(prior, dtype=torch.bool) if share >= 1 else fewest_with(prior, share)


def free_tokens(tokens: int, prior: Tensor | None, share: float) -> Mask:
    """Return (tokens,) bool: which tokens of such a chunk may be recomputed.

    prior: as stored; without one nothing is known, so none may, unless nothing is protected.
    share: see ``protected_tokens``.
    """
    if prior is None:
        prior, share = torch.zeros(tokens), float(share > 0)
    free: Mask = (~protected_tokens(prior, share)).numpy()
    return free
