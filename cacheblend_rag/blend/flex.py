"""FlexAttention over scattered rows: one fused kernel on an accelerator, without a mask in memory.

Source: PyTorch's FlexAttention (arXiv 2412.05496). The result is `attend_rows`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall

KEPT_MASKS = 8


class FlexAttention:
    """An `Attention` for one pass: layers that run the same rows share their block mask.

    On CUDA the kernel is compiled at its first use; on other devices PyTorch runs it uncompiled,
    which is for tests only.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int | None], tuple[Rows, BlockMask]] = {}

    def __call__(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        seen = rows.last + 1
        keys, values = (kv[:, :, :seen] for kv in fused.layer(call.layer))
        compiled = rows.device.device.type == "cuda"
        attend: Callable[..., Any] = _compiled() if compiled else cast(Any, flex_attention)
        options: dict[str, Any] = {
            "score_mod": None if call.softcap is None else _capped(call.softcap),
            "block_mask": self._mask(rows, seen, call.window),
            "scale": call.scaling,
            "enable_gqa": keys.shape[1] != call.query.shape[1],
        }
        if call.sinks is None:
            done: Tensor = attend(call.query, keys, values, **options)
        else:
            from torch.nn.attention.flex_attention import AuxRequest  # torch 2.9 or newer

            options["return_aux"] = AuxRequest(lse=True)  # each softmax's log-sum-exp
            done = _beside_sinks(call.sinks, *attend(call.query, keys, values, **options))
        return done.transpose(1, 2)

    def _mask(self, rows: Rows, seen: int, window: int | None) -> BlockMask:
        key = (id(rows), window)
        if key not in self._masks:
            while len(self._masks) >= KEPT_MASKS:
                self._masks.pop(next(iter(self._masks)))
            # the rows are kept too, so that Python does not reuse their id for other rows
            self._masks[key] = (rows, _block_mask(rows, seen, window))
        return self._masks[key][1]


def _beside_sinks(sinks: Tensor, done: Tensor, aux: Any) -> Tensor:
    """Rescale attention computed without sinks: a sink is one more term of each softmax."""
    share: Tensor = (aux.lse - sinks.float()[:, None]).sigmoid()
    return (done * share[..., None]).to(done.dtype)


def _block_mask(rows: Rows, seen: int, window: int | None) -> BlockMask:
    positions = rows.device

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        distance = positions[row] - key
        inside = distance >= 0
        return inside if window is None else inside & (distance < window)

    return create_block_mask(visible, None, None, len(rows), seen, positions.device)


@lru_cache(maxsize=8)
def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
