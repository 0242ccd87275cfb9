"""Tells logits that differ by rounding alone from logits that differ for another reason."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.0125, torch.bfloat16: 0.1}
"""Largest difference of logits by rounding, as a share of their spread, by the model's dtype.

Measured once, on a CPU, on the models of tests/families with outliers: those that go on from their
cache as they should are off by up to 0.009 in float16 and 0.012 in bfloat16, with another kind of
cache by 0.2 and more; positions off by one make 0.15 and more in 9 of 10. Kernels of a GPU may
round more: SmolLM2's logits in 16 bits are 0.003 and 0.04 off float32's, 0.13 with positions off
by one.
"""
QUANTIZED_TOLERANCE = 0.2
"""That of models whose weights are quantized: some quantize activations by the rows they come with.
"""


def same_logits(
    found: Tensor, wanted: Tensor, dtype: torch.dtype, *, quantized: bool = False
) -> bool:
    """Whether logits, (tokens, vocabulary) float32, are equal except for rounding.

    dtype: that the model computes in. In float32 every token's logits must be the same; elsewhere
    the median token counts, since rounding sends a few tokens to other experts.
    """
    off = _centred(found - wanted).norm(dim=-1) / _centred(wanted).norm(dim=-1)
    if quantized:
        return bool(off.median() <= QUANTIZED_TOLERANCE)
    counted = off if dtype == torch.float32 else off.median()
    return bool((counted <= TOLERANCES.get(dtype, 1e-3)).all())


def _centred(logits: Tensor) -> Tensor:
    """Logits without what all tokens of the vocabulary have in common: it changes no answer."""
    return logits - logits.mean(-1, keepdim=True)
