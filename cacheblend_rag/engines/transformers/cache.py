"""A Hugging Face cache over FusedKV, for decoding after a blend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import ReasonCode

GROWTH_TOKENS = 256


class FusedCache(Cache):  # type: ignore[misc] # base is untyped
    """A cache that decodes in place: no step copies KV; sliding-window layers keep all of it.

    fused: the prompt's KV, or an empty buffer that prefill will fill.
    length: tokens of it that hold KV already.
    windows: each layer's sliding window in tokens, or None. A layer with one attends to the tokens
    in it alone, as long as all windows are of one size: the model builds one mask for all of them.
    """

    def __init__(
        self, fused: FusedKV, length: int, windows: Sequence[int | None] | None = None
    ) -> None:
        self.fused = fused
        depth = fused.keys.shape[0]
        if windows is None or len({window for window in windows if window}) != 1:
            windows = (None,) * depth
        super().__init__(layers=[_FusedLayer(fused, i, length, windows[i]) for i in range(depth)])


def _grow(fused: FusedKV, tokens: int) -> None:
    """Make room for at least so many tokens, keeping what is there."""
    capacity = fused.keys.shape[2]
    for name in ("keys", "values"):
        old: Tensor = getattr(fused, name)
        new = old.new_empty(*old.shape[:2], max(tokens, capacity + GROWTH_TOKENS), old.shape[3])
        new[:, :, :capacity] = old
        setattr(fused, name, new)


class _FusedLayer(DynamicLayer):  # type: ignore[misc] # base is untyped
    """One layer's view of the fused buffer.

    It refers to the buffer, not to the cache: a reference cycle would keep the KV alive until the
    next garbage collection.
    """

    def __init__(self, fused: FusedKV, layer: int, length: int, window: int | None) -> None:
        super().__init__()
        self.fused, self.layer, self.length, self.window = fused, layer, length, window
        self.is_sliding = window is not None
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.shape[2]
        fused = self.fused
        if end > fused.keys.shape[2]:
            _grow(fused, end)
        if (
            key_states.shape[1::2] != fused.keys.shape[1::2]
            or value_states.shape != key_states.shape
        ):
            raise UnsupportedModelError(
                "its layers do not cache the keys and values they use",
                ReasonCode.UNSUPPORTED_ATTENTION,
            )
        first = self._first_seen()
        self.length = end
        return (
            _extended(fused.keys, self.layer, key_states, start, first),
            _extended(fused.values, self.layer, value_states, start, first),
        )

    def crop(self, max_length: int) -> None:
        """Forget the KV of all later tokens."""
        self.length = min(self.length, max_length)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_seen()
        return self.length + query_length - first, first

    def _first_seen(self) -> int:
        """Return the first position that any of the next tokens attends to."""
        return 0 if self.window is None else max(0, self.length - self.window + 1)


def _extended(held: Tensor, layer: int, new: Tensor, start: int, first: int) -> Tensor:
    """Write new KV at ``start``; return the layer's from ``first`` to its end, not copied.

    held: (layers, kv_heads, capacity, head_dim). new, and what is returned: (1, kv_heads, tokens,
    head_dim). As few operations as can be: on a CPU a step's time is partly theirs.
    """
    of_layer, count = held.narrow(0, layer, 1), new.shape[2]
    of_layer.narrow(2, start, count).copy_(new)
    return of_layer.narrow(2, first, start + count - first)
