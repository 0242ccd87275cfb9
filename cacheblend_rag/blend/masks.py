"""The masks of a pass's rows, made once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

from cacheblend_rag.blend.rows import Rows

MOST_MASK_BYTES = 32 << 20


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
