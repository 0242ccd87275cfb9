"""One layer of a chunk's KV, and where a prompt has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.kv.chunk_kv import ChunkKV


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer of a chunk, and its destination; start, turn: see ``FusedKV.place``."""

    start: int
    kv: ChunkKV
    turn: Rotation | None

    @property
    def kernel_supports(self) -> bool:
        """Whether the placement kernel supports its precision: native or fp8, not int4."""
        return self.kv.precision != "int4"

    def cut(self, tokens: int) -> tuple[LayerPart, LayerPart | None]:
        """Return its first tokens, and the rest."""
        if tokens >= self.kv.tokens:
            return self, None
        first = replace(self, kv=self.kv.cut(0, tokens))
        rest = self.kv.cut(tokens, self.kv.tokens)
        turn = None if self.turn is None else self.turn.skipping(tokens)
        return first, LayerPart(self.start + tokens, rest, turn)


@dataclass(frozen=True, slots=True)
class WholePart:
    """All layers of a chunk in memory, and their destination.

    kv: the chunk as its tier holds it, of which each layer is a view as far behind the one before.
    first: its first layer, or some tokens of it, but with the rotation of all layers.
    """

    kv: ChunkKV
    first: LayerPart
