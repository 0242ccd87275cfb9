"""Causal attention for scattered rows: each row sees exactly the keys at or before its position.

Rows are processed in blocks; a block reads only the keys from the first that its first row may see
to its last row, so scattered rows cost the causal triangle, not the whole rectangle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional

from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall

BLOCK_ROWS = 64
ACCELERATOR_BLOCK_ROWS = 1024
DISTANCE = torch.int32
MASK_STRIDE = 8
"""A mask's stride is a multiple of it, or fused kernels of GPUs would copy the mask first."""
LARGEST_LOGITS = 1 << 26
"""Most logits in memory at once, without a fused kernel."""
MOST_MASK_BYTES = 32 << 20

_lock = Lock()
_users = 0
_was_enabled = False


def attend_rows(
    call: AttentionCall,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    masks: MaskCache | None = None,
) -> Tensor:
    """Return the rows' attention, (batch, rows, heads, head_dim).

    keys, values: (batch, kv_heads, tokens, head_dim), index = position; every position that a row
    may see must hold finite values. masks: keeps the rows' masks for other layers.
    """
    batch, heads, count, width = call.query.shape
    copies, dtype = heads // keys.shape[1], call.query.dtype
    masks = MaskCache(0) if masks is None else masks
    out = call.query.new_empty(batch, count, heads, width)
    size = _block_rows(call.query.device, 0 if _is_fused(call) else heads * keys.shape[2])
    for start in range(0, count, size):  # whole blocks: matrix products are made for such sizes
        block = rows.part(start, start + size)
        stop = start + len(block)
        first = 0 if call.window is None else max(0, block.first - call.window + 1)
        seen = slice(first, block.last + 1)
        make = partial(mask_of, block, seen, call.window, copies=copies, dtype=dtype)
        mask = masks.get(rows, (start, stop, call.window), make)
        part = call.part(start, stop)
        out[:, start:stop] = attend_to(part, keys[:, :, seen], values[:, :, seen], mask)
    return out


def attend_to(
    call: AttentionCall, keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the attention of rows to all of the keys, (batch, rows, heads, head_dim).

    keys, values: (batch, kv_heads, keys, head_dim). mask: see ``mask_of``; without one every row
    sees every key.
    """
    batch, heads, rows, width = call.query.shape
    # Heads that share a KV head become additional rows of it: no KV is repeated, and every
    # backend's fused kernel takes the mask.
    query = call.query.reshape(batch, keys.shape[1], -1, width)
    if _is_fused(call):
        with without_cudnn():
            done = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=call.scaling
            )
    else:
        done = _shares(call, query, keys, mask).to(query.dtype) @ values
    return done.reshape(batch, heads, rows, width).transpose(1, 2)


def attention_mass(call: AttentionCall, keys: Tensor, rows: Rows) -> Tensor:
    """Return how much of each row's attention every key gets: (heads, rows, tokens) float32.

    keys: (1, kv_heads, tokens, head_dim). A sink's share is missing from the sum.
    """
    _, heads, count, width = call.query.shape
    kv_heads, tokens = keys.shape[1:3]
    query = call.query.float().reshape(1, kv_heads, -1, width)
    seen, copies = slice(0, rows.last + 1), heads // kv_heads  # later keys may be no numbers yet
    mask = mask_of(rows, seen, call.window, copies=copies, dtype=query.dtype)
    shares = _shares(call, query, keys[:, :, seen].float(), mask).reshape(heads, count, -1)
    return functional.pad(shares, (0, tokens - seen.stop))


def attention_bytes(
    tokens: int, heads: int, kv_heads: int, device: torch.device, size: int, *, in_steps: bool
) -> int:
    """Return the peak memory of attend_rows for so many tokens, without its result, in bytes.

    size: bytes per element. in_steps: whether there are capped logits or sinks.
    """
    rows = min(tokens, _block_rows(device, heads * tokens if in_steps else 0))
    copies, stride = heads // kv_heads, _stride(tokens)
    mask = rows * (stride * copies * size + tokens * (DISTANCE.itemsize + 2))
    mask += min(MOST_MASK_BYTES, tokens * stride * copies * size)  # of a pass's other rows
    logits = 3 * tokens * rows * heads * torch.float32.itemsize
    return mask + logits if in_steps else mask


def _block_rows(device: torch.device, logits_a_row: int) -> int:
    """Return how many rows attend at once, if each materializes so many logits."""
    most = BLOCK_ROWS if device.type == "cpu" else ACCELERATOR_BLOCK_ROWS
    return most if logits_a_row == 0 else max(1, min(most, LARGEST_LOGITS // logits_a_row))


def _is_fused(call: AttentionCall) -> bool:
    """Whether PyTorch's fused attention can compute it, which neither caps logits nor has sinks."""
    return call.softcap is None and call.sinks is None


def _shares(call: AttentionCall, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Return what each row gives to every key, (batch, kv_heads, copies x rows, keys) float32.

    query: (batch, kv_heads, copies x rows, head_dim); logits are of its dtype.
    """
    logits = capped((query @ keys.transpose(2, 3)).mul_(call.scaling), call.softcap)
    return softmax(logits if mask is None else logits.add_(mask), call.sinks)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits capped at ``softcap``, smoothly, or as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis, in float32, with an optional sink for each head.

    logits: (..., kv_heads, copies x rows, keys). sinks: (kv_heads x copies,).
    """
    if sinks is None:
        return logits.softmax(-1, dtype=torch.float32)
    kv_heads, rows = logits.shape[-3:-1]
    own = sinks.to(logits.dtype).view(kv_heads, -1, 1)
    beside = own.expand(-1, -1, rows // own.shape[1]).reshape(kv_heads, rows, 1)
    whole = torch.cat((logits, beside.expand(*logits.shape[:-1], 1)), -1)
    return whole.softmax(-1, dtype=torch.float32)[..., :-1]


def mask_of(
    rows: Rows, seen: slice, window: int | None, *, copies: int, dtype: torch.dtype
) -> Tensor:
    """Return the additive attention mask, 0 or -infinity, (copies x rows, keys seen) of ``dtype``.

    Without a window every row sees the keys before the first row, so only the rest is compared.
    """
    first = rows.first if window is None else seen.start
    device, count = rows.device.device, seen.stop - seen.start
    shape = (copies, len(rows), _stride(count))
    bias = torch.zeros(shape, dtype=dtype, device=device)[:, :, :count]
    visible = visible_keys(rows, slice(first, seen.stop), window)
    bias[:, :, first - seen.start :].masked_fill_(~visible, float("-inf"))
    return bias.flatten(0, 1)


def _stride(keys: int) -> int:
    """Return how far the rows of a mask for so many keys are apart."""
    return -(-keys // MASK_STRIDE) * MASK_STRIDE


def visible_keys(rows: Rows, keys: slice, window: int | None) -> Tensor:
    """(rows, keys) bool: which of the keys at these positions a row may see.

    Not later ones, nor those outside its window.
    """
    positions = torch.arange(keys.start, keys.stop, dtype=DISTANCE, device=rows.device.device)
    distance = rows.device.to(DISTANCE)[:, None] - positions[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


class MaskCache:
    """Keeps masks as long as the rows that they are for, and at most ``most_bytes`` of them.

    Masks beyond that are made anew in every layer: evicting others for them would only make those
    anew in the next layer.
    """

    def __init__(self, most_bytes: int = MOST_MASK_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: WeakKeyDictionary[Rows, dict[Hashable, Tensor]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all masks that are kept."""
        masks = (mask for kept in self._kept.values() for mask in kept.values())
        return sum(mask.untyped_storage().nbytes() for mask in masks)

    def get(self, rows: Rows, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the mask of these rows that ``key`` names, made by ``make`` unless it is kept."""
        kept = self._kept.setdefault(rows, {})
        if key in kept:
            return kept[key]
        made = make()
        if self.nbytes + made.untyped_storage().nbytes() <= self._most_bytes:
            kept[key] = made
        return made


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Keep `scaled_dot_product_attention` off cuDNN; safe to nest and to use in several threads.

    From PyTorch 2.11 on, attention with a mask uses cuDNN on Hopper and Blackwell GPUs. cuDNN
    compiles a plan for each new shape (about 0.4 s), and with fewer than 8 KV heads it was reported
    to compute wrong results (pytorch issue 193893). The backend switch is process-wide, and
    PyTorch's own context manager for it is not thread-safe: the thread that leaves last may restore
    another one's temporary setting. So users are counted: the first one switches cuDNN off, the
    last one restores the original setting.
    """
    global _users, _was_enabled  # noqa: PLW0603 - the setting is the process's, too
    with _lock:
        if not _users:
            _was_enabled = bool(cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
            cuda.enable_cudnn_sdp(False)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                cuda.enable_cudnn_sdp(_was_enabled)
