"""Causal attention on CPUs by PyTorch's flash kernel, in calls most of which need no mask.

In blocks of rows that attend under a mask, the kernel also computes logits that the mask then
removes, and it is slower with a mask and with few rows. So scattered rows are halved again and
again: all of the later half see the keys before its first row, in one call without a mask. Only
where few rows or at most `LEAF_KEYS` keys are left, blocks of rows attend under masks. A run of
rows attends to the keys before it, and causally to its own. What a row attends to in several parts
is weighted by the sums of its exponentials in each, as FlashAttention (arXiv 2205.14135) combines
blocks of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cacheblend_rag.blend.attention import DTYPES, mask_of
from cacheblend_rag.blend.masks import MaskCache
from cacheblend_rag.blend.rows import Rows

LEAF_KEYS = 2048
"""Query rows that attend to fewer keys than this are not split into parts, so that shorter prompts
gain nothing."""
LEAST_HALVED = 32
"""Groups of at most this many query rows are not split further, whatever their keys."""
LEAF_ROWS, LEAF_ROWS_16_BIT = 64, 128
"""Maximum number of query rows in a masked call, in float32 and in 16-bit dtypes."""
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
"""PyTorch's fused kernel, which also returns the logarithms of the rows' sums of exponentials."""


def prefers_rectangles(query: Tensor, keys: Tensor, values: Tensor, tokens: int) -> bool:
    """Whether `attend_by_rectangles` supports these tensors, and pays at this prompt length.

    The kernel, called directly, checks neither strides nor widths. query: (batch, heads, rows,
    head_dim). keys, values: (batch, kv_heads, tokens, head_dim). tokens: prompt length.
    """
    parts = (query, keys, values)
    is_supported = query.device.type == "cpu" and query.dtype in DTYPES
    is_alike = len({(part.dtype, part.shape[3], part.stride(3)) for part in parts}) == 1
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    is_long = tokens > LEAF_KEYS and hasattr(torch.ops.aten, OPERATOR)
    return is_supported and is_long and is_alike and query.stride(3) == 1 and not learns


def rectangles_bytes(rows: int, heads: int, head_dim: int, size: int) -> int:
    """Return the peak temporary memory of `attend_by_rectangles` in bytes, masks excluded.

    size: bytes per element.
    """
    return rows * heads * head_dim * (2 * size + 2 * torch.float32.itemsize)


def attend_by_rectangles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    *,
    scaling: float,
    masks: MaskCache | None = None,
) -> Tensor:
    """Return causal attention of query rows at any positions, (batch, rows, heads, head_dim).

    Arguments as for `attend_rows`. Partial results are merged in float32. Without gradients,
    sliding windows, logit caps and attention sinks.
    """
    leaf_rows = LEAF_ROWS if query.dtype == torch.float32 else LEAF_ROWS_16_BIT
    if rows.is_run and len(rows) > leaf_rows:
        return _attend_run(query, keys, values, rows, scaling)
    batch, heads, count, width = query.shape
    kv_heads = keys.shape[1]
    copies = heads // kv_heads
    masks = MaskCache(0) if masks is None else masks
    # Heads that share a KV head become additional rows of it, side by side: parts are views.
    grouped = query.view(batch, kv_heads, copies, count, width).transpose(2, 3).flatten(2, 3)
    out = query.new_empty(grouped.shape, dtype=torch.float32)
    sums = query.new_empty(grouped.shape[:3], dtype=torch.float32)
    for part in _parts(rows, leaf_rows):
        mask = None
        if part.is_masked:
            block = rows.part(part.rows.start, part.rows.stop)
            name = (part.rows.start, part.rows.stop, copies, query.dtype, OPERATOR)
            mask = masks.get(rows, name, partial(_mask, block, part.keys, copies, query.dtype))
        here = slice(part.rows.start * copies, part.rows.stop * copies)
        attended, attended_sums = _attend(
            grouped[:, :, here], keys[:, :, part.keys], values[:, :, part.keys], scaling, mask=mask
        )
        if part.is_first:
            out[:, :, here], sums[:, :, here] = attended, attended_sums
        else:
            _merge(out[:, :, here], sums[:, :, here], attended, attended_sums)
    done = out.view(batch, kv_heads, count, copies, width).transpose(1, 2)
    return done.to(query.dtype).reshape(batch, count, heads, width)


def _attend_run(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Return causal attention of consecutive query positions, (batch, rows, heads, head_dim)."""
    batch, heads, count, width = query.shape
    kv_heads = keys.shape[1]
    before, own = slice(0, rows.first), slice(rows.first, rows.last + 1)
    done = query.new_empty(batch, count, heads, width)
    # One head at a time of those that share a KV head: older kernels take no more heads than keys
    # have, and no mask that is causal for rows side by side.
    for copy in range(heads // kv_heads):
        alike = slice(copy, None, heads // kv_heads)
        asked = query[:, alike]
        out, sums = _attend(asked, keys[:, :, own], values[:, :, own], scaling, is_causal=True)
        if rows.first:
            part, part_sums = _attend(asked, keys[:, :, before], values[:, :, before], scaling)
            out = out.float()
            _merge(out, sums, part, part_sums)
        done[:, :, alike] = out.transpose(1, 2)
    return done


@dataclass(frozen=True, slots=True)
class _Part:
    """One call of the kernel: indices of query rows, and positions of keys.

    is_masked: whether not all of the rows see all of the keys. is_first: whether it is the first
    part of its rows.
    """

    rows: slice
    keys: slice
    is_masked: bool
    is_first: bool


def _parts(rows: Rows, leaf_rows: int) -> Iterator[_Part]:
    """Yield the calls that cover the causal mask: each row's visible keys, each of them once."""
    begin = rows.first if rows.first >= LEAF_KEYS else 0
    if begin:
        yield _Part(slice(0, len(rows)), slice(0, begin), is_masked=False, is_first=True)
    yield from _halves(rows, slice(0, len(rows)), begin, leaf_rows, is_first=not begin)


def _halves(
    rows: Rows, of: slice, begin: int, leaf_rows: int, *, is_first: bool
) -> Iterator[_Part]:
    """Yield the calls for some of the rows over their visible keys from position ``begin`` on."""
    count = of.stop - of.start
    if count <= LEAST_HALVED or int(rows.host[of.stop - 1]) - begin < LEAF_KEYS:
        for index, block in rows.part(of.start, of.stop).blocks(leaf_rows):
            here = slice(of.start + index, of.start + index + len(block))
            yield _Part(here, slice(begin, block.last + 1), is_masked=True, is_first=is_first)
        return
    middle = of.start + count // 2
    border = int(rows.host[middle])
    later = slice(middle, of.stop)
    yield from _halves(rows, slice(of.start, middle), begin, leaf_rows, is_first=is_first)
    yield _Part(later, slice(begin, border), is_masked=False, is_first=is_first)
    yield from _halves(rows, later, border, leaf_rows, is_first=False)


def _mask(block: Rows, keys: slice, copies: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask, (rows * copies, keys); the copies of a row are adjacent."""
    return mask_of(block, keys, None, copies=1, dtype=dtype).repeat_interleave(copies, dim=0)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (attention output, log-sum-exp of each row's logits).

    query: (batch, kv_heads, rows, head_dim). The log-sum-exps are (batch, kv_heads, rows) float32.
    """
    kernel = getattr(torch.ops.aten, OPERATOR)
    found: tuple[Tensor, Tensor] = kernel(
        query, keys, values, 0.0, is_causal, attn_mask=mask, scale=scaling
    )
    return found


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Merge the attention output over other keys into ``out``, in place, by log-sum-exp.

    out: (..., rows, head_dim) float32. sums: (..., rows) float32, its log-sum-exps. part,
    part_sums: the same of the other keys.
    """
    out.lerp_(part.float(), torch.sigmoid(part_sums - sums)[..., None])
    torch.logaddexp(sums, part_sums, out=sums)
