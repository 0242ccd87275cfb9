"""Re-rotation: moving cached keys from the positions they were computed at to new ones.

A rotary embedding turns each pair of key components by position x frequency, so moving a key by an
offset is one more turn by offset x frequency, the same for every token of a chunk. Source: RoFormer
(arXiv 2104.09864); its use on cached chunks: CacheBlend (arXiv 2405.16444).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_into(out: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write ``keys`` turned by (cos, sin) into ``out``; computed in float32.

    out, keys: (layers, kv_heads, tokens, head_dim). cos, sin: (layers, rotary_dim) float32, in the
    half-split layout (component i pairs with i + rotary_dim / 2). Components past rotary_dim are
    copied.
    """
    rotary = cos.shape[-1]
    half = rotary // 2
    c, s = cos[:, None, None, :half], sin[:, None, None, :half]
    if keys.dtype == torch.float32 and out.dtype == torch.float32:
        first, second = keys[..., :half], keys[..., half:rotary]
        torch.mul(first, c, out=out[..., :half]).addcmul_(second, s, value=-1)
        torch.mul(second, c, out=out[..., half:rotary]).addcmul_(first, s)
    else:
        first, second = keys[..., :half].float(), keys[..., half:rotary].float()
        out[..., :half] = first * c - second * s
        out[..., half:rotary] = second * c + first * s
    if rotary < keys.shape[-1]:
        out[..., rotary:] = keys[..., rotary:]


def rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``keys`` (layers, kv_heads, tokens, head_dim) turned by (cos, sin), same dtype."""
    out = torch.empty_like(keys)
    rotate_into(out, keys, cos, sin)
    return out
