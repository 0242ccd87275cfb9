"""Causal attention for scattered rows: each row sees exactly the keys at or before its position.

Rows are processed in blocks; a block reads only the keys from the first that its first row may see
to its last row, so scattered rows cost the causal triangle, not the whole rectangle.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional

from cacheblend_rag.blend.rows import Rows

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
    """Return the rows' attention, (batch, rows, heads, head_dim).

    query: (batch, heads, rows, head_dim). keys, values: (batch, kv_heads, tokens, head_dim), index
    = position; every position that a row may see must hold finite values. window: keys a row may
    see at most, itself included. softcap: logits are capped at it, or None. sinks: (heads,), each
    head's attention sink as a logit, or None. masks: keeps the rows' masks for other layers.
    """
    batch, heads, count, width = query.shape
    kv_heads = keys.shape[1]
    copies = heads // kv_heads
    masks = MaskCache(0) if masks is None else masks
    out = query.new_empty(batch, count, heads, width)
    in_steps = softcap is not None or sinks is not None
    size = _block_rows(query.device, heads * keys.shape[2] if in_steps else 0)
    for start, block in rows.blocks(size, even=False):
        here = slice(start, start + len(block))
        seen = slice(first_key(block, window), block.last + 1)
        # Heads that share a KV head become additional rows of it: no KV is repeated, and every
        # backend's fused kernel takes the mask.
        part = (
            query[:, :, here].reshape(batch, kv_heads, -1, width),
            keys[:, :, seen],
            values[:, :, seen],
        )
        named = (here.start, here.stop, window, copies, query.dtype)
        make = partial(mask_of, block, seen, window, copies=copies, dtype=query.dtype)
        mask = masks.get(rows, named, make)
        if not in_steps:
            with without_cudnn():
                done = functional.scaled_dot_product_attention(*part, attn_mask=mask, scale=scaling)
        else:
            done = attend_in_steps(*part, mask=mask, scaling=scaling, softcap=softcap, sinks=sinks)
        out[:, here] = done.reshape(batch, heads, -1, width).transpose(1, 2)
    return out


def attend_token(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of one token to all of the keys, (1, 1, heads, head_dim).

    query: (1, heads, 1, head_dim). keys, values: (1, kv_heads, tokens, head_dim), only those that
    the token may see. The rest as for attend_rows.
    """
    heads, width = query.shape[1], query.shape[3]
    # As in attend_rows, heads that share a KV head are rows of it.
    part = (query.reshape(1, keys.shape[1], -1, width), keys, values)
    if softcap is None and sinks is None:
        with without_cudnn():
            done = functional.scaled_dot_product_attention(*part, scale=scaling)
    else:
        mask = query.new_zeros(())
        done = attend_in_steps(*part, mask=mask, scaling=scaling, softcap=softcap, sinks=sinks)
    return done.reshape(1, 1, heads, width)


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


def attend_in_steps(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped logits or sinks, which PyTorch's fused attention cannot do."""
    kv_heads, rows = query.shape[1:3]
    logits = capped(query @ keys.transpose(2, 3) * scaling, softcap) + mask
    if sinks is not None:
        copies = sinks.numel() // kv_heads
        sinks = sinks.view(kv_heads, copies, 1).expand(-1, -1, rows // copies).flatten(1, 2)
    return shares(logits, sinks).to(query.dtype) @ values


def attention_mass(
    query: Tensor,
    keys: Tensor,
    rows: Rows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return how much of each row's attention every key gets: (heads, rows, tokens) float32.

    query: (1, heads, rows, head_dim). keys: (1, kv_heads, tokens, head_dim). The rest as for
    attend_rows; a sink's share is missing from the sum.
    """
    (heads, count, width), (kv_heads, tokens) = query.shape[1:], keys.shape[1:3]
    copies = heads // kv_heads
    # As in attend_rows, heads that share a KV head are rows of it, and only the keys are compared
    # that not all of the rows see.
    grouped = (query[0].float() * scaling).reshape(kv_heads, copies * count, width)
    masked = slice(rows.first if window is None else 0, tokens)
    hidden = ~visible_keys(rows, masked, window)
    if sinks is not None:
        sinks = sinks.view(kv_heads, copies, 1).expand(-1, -1, count)
    logits = grouped @ keys[0].float().transpose(1, 2)
    logits = capped(logits, softcap).view(-1, copies, count, tokens)
    logits[..., masked].masked_fill_(hidden, float("-inf"))
    return shares(logits, sinks).flatten(0, 1)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits capped at ``softcap``, smoothly, or as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def shares(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in float32 over the last axis, with an optional sink for each row, (..., rows)."""
    if sinks is None:
        return logits.softmax(-1, dtype=torch.float32)
    beside = sinks.to(logits.dtype)[..., None].expand(*logits.shape[:-1], 1)
    return torch.cat((logits, beside), -1).softmax(-1, dtype=torch.float32)[..., :-1]


def first_key(rows: Rows, window: int | None) -> int:
    """Return the first position that any of the rows may see."""
    return 0 if window is None else max(0, rows.first - window + 1)


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
        self._kept: WeakKeyDictionary[Rows, _Kept] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all masks that are kept."""
        return sum(kept.nbytes for kept in self._kept.values())

    def get(self, rows: Rows, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the mask of these rows that ``key`` names, made by ``make`` unless it is kept."""
        kept = self._kept.setdefault(rows, _Kept())
        if key in kept.masks:
            return kept.masks[key]
        made = make()
        nbytes = made.untyped_storage().nbytes()
        if self.nbytes + nbytes <= self._most_bytes:
            kept.masks[key] = made
            kept.nbytes += nbytes
        return made


@dataclass
class _Kept:
    """The masks of some rows."""

    masks: dict[Hashable, Tensor] = field(default_factory=dict)
    nbytes: int = 0


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
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users, _was_enabled  # noqa: PLW0603 - the setting is the process's, too
    with _lock:
        if not _users:
            _was_enabled = bool(cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
            cuda.enable_cudnn_sdp(False)
        _users += 1


def _leave() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if not _users:
            cuda.enable_cudnn_sdp(_was_enabled)
