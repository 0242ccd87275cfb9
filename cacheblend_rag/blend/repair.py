"""Moves a chunk's stored keys and values by the mean change of its recomputed tokens.

Source: AgentKVShift (arXiv 2607.21604). Keys are compared without their positions: each change is
rotated to the chunk's first token, and the mean to every token that it is added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rotary import Rotation, rotated
from cacheblend_rag.blend.rows import Mask, Positions, Rows
from cacheblend_rag.blend.stack import DecoderStack

BLOCK = 4096
"""Most tokens whose KV is repaired in one operation: bounds the size of temporary tensors."""


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens of chunks. positions: (tokens,) int64 on the device. offsets: (tokens,) float32 there,
    their distance from their chunk's first token.
    """

    positions: Tensor
    offsets: Tensor

    @classmethod
    def at(cls, positions: Positions, offsets: NDArray[np.int64], device: torch.device) -> _Tokens:
        return cls(*(_sent(part, device) for part in (positions, offsets.astype(np.float32))))


@dataclass(frozen=True, eq=False)
class RowsRepair:
    """What recomputed rows change beside them.

    picked: (recomputed,) int64, indices among the rows of those that belong to a chunk with other
    tokens. means: (chunks, recomputed) float32, which averages them by chunk. others: the tokens to
    repair, in blocks, and the chunk of each, (block,) int64.
    """

    repair: KVRepair
    recomputed: _Tokens
    picked: Tensor
    means: Tensor
    others: Sequence[tuple[_Tokens, Tensor]]

    def apply(self, fused: FusedKV, layer: int, keys: Tensor, values: Tensor) -> None:
        """Repair a layer, before the rows' fresh KV (1, kv_heads, rows, head_dim) is written."""
        repair, whole = self.repair, fused.of_layer(layer)
        for fresh, stored, share, turns in (
            (keys, whole[0], repair.keys, True),
            (values, whole[1], repair.values, False),
        ):
            if not share:
                continue
            before = stored.index_select(1, self.recomputed.positions).float()
            change = fresh[0].index_select(1, self.picked).float() - before
            if turns:
                change = repair.turned(layer, change, -self.recomputed.offsets)
            mean = torch.einsum("cn,hnd->hcd", self.means, change)
            for others, slots in self.others:
                added = share * mean.index_select(1, slots)
                if turns:
                    added = repair.turned(layer, added, others.offsets)
                stored.index_add_(1, others.positions, added.to(stored.dtype))


class KVRepair:
    """Plans the repairs of a pass.

    stack: whose layers rotate keys. chunks: (tokens,) int64, each token's chunk, -1 outside.
    eligible: (tokens,) bool, tokens that may change. keys, values: shares of the mean change to
    add, from 0 to 1.
    """

    def __init__(
        self, stack: DecoderStack, chunks: Positions, eligible: Mask, keys: float, values: float
    ) -> None:
        self.keys, self.values = keys, values
        self._chunks, self._eligible = chunks, eligible & (chunks >= 0)
        self._device = stack.geometry.device
        by_one = stack.rotation(1)
        self._known, self._firsts = np.unique(chunks, return_index=True)
        self._angles = torch.atan2(by_one.sin, by_one.cos).to(self._device)
        self._interleaved = by_one.interleaved

    def of(self, rows: Rows) -> RowsRepair | None:
        """Return what ``rows``, all that are computed, repair; None for nothing."""
        mine = self._eligible[rows.host]
        others = self._eligible.copy()
        others[rows.host] = False
        chunks = np.intersect1d(self._chunks[rows.host[mine]], self._chunks[others])
        if not len(chunks):
            return None
        picked = np.flatnonzero(mine & np.isin(self._chunks[rows.host], chunks))
        targets = np.flatnonzero(others & np.isin(self._chunks, chunks))
        recomputed, device = rows.host[picked], self._device
        belong = self._chunks[recomputed][None] == chunks[:, None]
        means = (belong / belong.sum(1, keepdims=True)).astype(np.float32)
        return RowsRepair(
            self,
            _Tokens.at(recomputed, self._offsets(recomputed), device),
            _sent(picked, device),
            _sent(means, device),
            [
                (
                    _Tokens.at(block, self._offsets(block), device),
                    _sent(np.searchsorted(chunks, self._chunks[block]), device),
                )
                for block in np.split(targets, range(BLOCK, len(targets), BLOCK))
            ],
        )

    def _offsets(self, positions: Positions) -> Positions:
        """Return the distance of each position from the first one of its chunk."""
        return positions - self._firsts[np.searchsorted(self._known, self._chunks[positions])]

    def turned(self, layer: int, keys: Tensor, offsets: Tensor) -> Tensor:
        """Return keys (kv_heads, tokens, head_dim), each rotated by its own offset."""
        angles = offsets[:, None] * self._angles[layer]
        turn = Rotation(angles.cos(), angles.sin(), self._interleaved)
        return rotated(keys.transpose(0, 1)[:, :, None], turn)[:, :, 0].transpose(0, 1)


def _sent(part: NDArray[np.int64] | NDArray[np.float32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(part)).to(device, non_blocking=True)
