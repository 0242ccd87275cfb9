"""Causal attention as whole matrix products, for CPUs on which they are faster than fused kernels.

PyTorch's fused attention for CPUs multiplies small tiles through MKL, on AMD's CPUs at a third of
the rate that oneDNN reaches with AVX-512. (On Intel's the fused kernel is the faster one.) So a
block of rows computes all its logits at once, then their softmax, then the weighted values, for one
KV head after another, in float32 whatever the inputs are. The softmax is by powers of two, and its
sum divides what is attended, not the weights: this takes two thirds of the time of PyTorch's
``softmax``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cacheblend_rag.blend.attention import (
    DTYPES,
    capped,
    first_key,
    visible_keys,
)
from cacheblend_rag.blend.masks import MaskCache
from cacheblend_rag.blend.onednn import LEAST_TOKENS, onednn_is_faster, onednn_linear
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.memory import raise_malloc_threshold

MATMUL_ROWS = 384
"""Rows of a product, about, heads that share a KV head counted apart: enough for oneDNN to be
efficient, few enough for the logits to stay in the cache."""
MOST_LOGITS = 7 << 20
"""Maximum number of logits in one matmul, 28 MiB of float32. malloc reuses freed blocks of up to
31 MiB (`raise_malloc_threshold`); pages of larger ones would be cleared anew for each product."""
LEAST_BLOCK = 32
"""Least rows of a prompt in a product, however many heads share a KV head."""
LARGEST_EXPONENT = 64.0
"""The softmax subtracts the rows' maximum logits only if one is beyond plus or minus this. Else,
in float32 sums of powers up to 2**64, times values, do not overflow, and in a row whose largest is
2**-64 only those underflow that are less than 2**-62 of it."""
LOG2_E = math.log2(math.e)
"""exp(x) is 2**(x * LOG2_E)."""


def prefers_matmul(query: Tensor, tokens: int) -> bool:
    """Whether `attend_by_matmul` should compute the attention of these queries.

    That is where `onednn_is_faster`, for a batch of one prompt of at least `LEAST_TOKENS` tokens,
    in float32, bfloat16 or float16. query: (batch, heads, rows, head_dim). tokens: prompt length.
    """
    is_supported = query.device.type == "cpu" and query.dtype in DTYPES and query.shape[0] == 1
    return is_supported and tokens >= LEAST_TOKENS and onednn_is_faster()


def attend_by_matmul(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    masks: MaskCache | None = None,
) -> Tensor:
    """Return causal attention of query rows, (1, rows, heads, head_dim), as `attend_rows` does.

    Arguments as for `attend_rows`. For one prompt, without gradients.
    """
    raise_malloc_threshold()  # for the logits
    _, heads, count, width = query.shape
    kv_heads = keys.shape[1]
    copies = heads // kv_heads
    masks = MaskCache() if masks is None else masks
    blocks = list(_blocks(rows, window, _block_rows(copies, keys.shape[2]), masks))
    # Heads that share a KV head become additional rows of its products.
    grouped = query[0].view(kv_heads, copies, count, width)
    grouped_sinks = None if sinks is None else (sinks.float() * LOG2_E).view(kv_heads, copies, 1, 1)
    out = query.new_empty(1, count, heads, width)
    grouped_out = out.view(count, kv_heads, copies, width)
    for head in range(kv_heads):
        head_keys, head_values = (part[0, head].float().contiguous() for part in (keys, values))
        scaled = grouped[head].float() * (scaling if softcap is not None else scaling * LOG2_E)
        for block in blocks:
            bias, asked = block.bias(), scaled[:, block.here].reshape(-1, width)
            logits = onednn_linear(asked, head_keys[block.keys]).view(copies, len(bias), -1)
            if softcap is not None:
                logits = capped(logits, softcap).mul_(LOG2_E)
            seen = logits.shape[2] - block.later
            logits[:, :, seen - bias.shape[1] : seen] += bias
            if block.later:
                logits[:, :, seen:] = -torch.inf
            weights, total = _powers(logits, None if grouped_sinks is None else grouped_sinks[head])
            attended = onednn_linear(weights.flatten(0, 1), head_values[block.keys].T)
            attended = attended.view(copies, -1, width).div_(total)
            grouped_out[block.here, head] = attended.transpose(0, 1)
    return out


def _powers(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return exp2(logits), computed in place, and the row sums: (heads, rows, 1).

    They are softmax's numerators and denominators, since logits and sinks come multiplied by
    `LOG2_E`. Each row's maximum, of logits and sink, is subtracted first, but only if some row's is
    beyond ``LARGEST_EXPONENT`` or not finite. logits: (heads, rows, keys) float32. sinks: (heads,
    1, 1), added to the denominators, or None.
    """
    largest = logits.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    if not bool((largest.abs() <= LARGEST_EXPONENT).all()):
        logits -= largest
        sinks = None if sinks is None else sinks - largest
    powers = torch.exp2(logits, out=logits)
    total = powers.sum(-1, keepdim=True)
    return powers, total if sinks is None else total + torch.exp2(sinks)


def attend_by_mass(mass: Tensor, values: Tensor, seen: int) -> Tensor:
    """Multiply attention weights, as `attention_mass` returns them, by the values.

    mass: the weights, (heads, rows, tokens) float32. values: (1, kv_heads, tokens, head_dim).
    seen: the last row's position + 1; values from there on are not read. Returns (1, rows, heads,
    head_dim), of the values' dtype, as `attend_rows` does.
    """
    (heads, count, tokens), (kv_heads, _, width) = mass.shape, values.shape[1:]
    grouped, values = mass.view(kv_heads, -1, tokens)[:, :, :seen], values[0, :, :seen]
    parts = [
        onednn_linear(grouped[head].contiguous(), values[head].float().T)
        for head in range(kv_heads)
    ]
    return torch.cat(parts).view(heads, count, width).transpose(0, 1)[None].to(values.dtype)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of query rows whose attention logits, of one KV head, are one matrix product.

    here: the rows' indices. keys: positions of the keys in the product: all that any of the rows
    sees, and ``later`` more, which none of them sees. bias: returns what to add to the logits of
    the last of the keys that are seen, those that not all of the rows see: (rows, keys) float32.
    """

    here: slice
    keys: slice
    later: int
    bias: Callable[[], Tensor]


def _blocks(rows: Rows, window: int | None, most: int, masks: MaskCache) -> Iterator[_Block]:
    """Split query rows into blocks of at most ``most`` rows.

    oneDNN compiles a product for each shape, so runs of different lengths should share shapes. All
    blocks of a run but the last have ``most`` rows, and their number of keys is rounded up, but not
    beyond the run's last row, because later KV may not be computed yet. (Where a window begins
    after the first token, blocks have equally many keys as it is.) Scattered rows get even blocks
    and exact keys: rounding would not make them share shapes.
    """
    is_run = rows.is_run
    for start, block in rows.blocks(most, even=not is_run):
        first, stop = first_key(block, window), block.last + 1
        end = min(_rounded_up(stop), rows.last + 1) if is_run and first == 0 else stop
        masked = slice(block.first if window is None else first, stop)
        # Blocks of a run that have equally many rows have one mask, but for those before a window
        # begins.
        name = (len(block), masked.stop - masked.start) if is_run else (start, most)
        bias = partial(masks.get, rows, (*name, window), partial(_bias, block, masked, window))
        yield _Block(slice(start, start + len(block)), slice(first, end), end - stop, bias)


def _rounded_up(keys: int) -> int:
    """Round up to the next of 16 evenly spaced values between consecutive powers of two."""
    step = 1 << max(0, (keys - 1).bit_length() - 5)
    return -(-keys // step) * step


def _block_rows(copies: int, tokens: int) -> int:
    """Return how many rows attend at once."""
    most = max(LEAST_BLOCK, MATMUL_ROWS // copies)
    return max(1, min(most, MOST_LOGITS // (copies * tokens)))


def _bias(rows: Rows, keys: slice, window: int | None) -> Tensor:
    """(rows, keys) float32: 0 where a row sees a key, else -infinity."""
    visible = visible_keys(rows, keys, window)
    bias = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))
