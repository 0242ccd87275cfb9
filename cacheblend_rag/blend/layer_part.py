"""One layer of a chunk's KV, and where a prompt has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.kv.packed_kv import LayerKV, PackedLayer, StoredKV


@dataclass(frozen=True, slots=True)
class Numbers:
    """Plain keys and values of one layer, each (kv_heads, tokens, head_dim); as PackedLayer."""

    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[1])

    @property
    def row_bytes(self) -> int:
        return 2 * self.keys.nbytes // self.tokens

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def cut(self, start: int, end: int) -> Numbers:
        return Numbers(self.keys[:, start:end], self.values[:, start:end])

    def moved(self, tensors: Sequence[Tensor]) -> Numbers:
        return Numbers(*tensors)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


Sendable = Numbers | PackedLayer
"""One layer of a chunk in a form that can be copied to a device."""


def sendable(kv: LayerKV) -> Sendable:
    """Wrap one layer of a chunk's KV as a Sendable, without copying it."""
    return kv if isinstance(kv, PackedLayer) else Numbers(*kv)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer of a chunk, and its destination; start, turn: see ``FusedKV.place``."""

    start: int
    kv: Sendable
    turn: Rotation | None

    def cut(self, tokens: int) -> tuple[LayerPart, LayerPart | None]:
        """Return its first tokens, and the rest."""
        if tokens >= self.kv.tokens:
            return self, None
        first = replace(self, kv=self.kv.cut(0, tokens))
        rest = self.kv.cut(tokens, self.kv.tokens)
        return first, replace(self, start=self.start + tokens, kv=rest)


@dataclass(frozen=True, slots=True)
class WholePart:
    """All layers of a chunk in memory, and their destination.

    kv: the chunk as its tier holds it, of which each layer is a view as far behind the one before.
    first: its first layer, or some tokens of it, but with the rotation of all layers.
    """

    kv: StoredKV
    first: LayerPart
