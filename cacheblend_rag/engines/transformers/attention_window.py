"""Finds the attention window of each layer from the mask function that the model builds for it.

Some families pass their sliding window to attention as a number, some only through the mask.
PyTorch's attention uses the mask, so the mask function is evaluated at large positions, without
building a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import ReasonCode

ASKED_ROWS = (5_003, 77_777, 1_048_573)
"""No multiple of a usual block size, so that block-wise masks are detected."""


class AttentionWindow:
    """Represents the mask of one layer.

    sees: (batch, head, row, key) -> whether the row may see the key, all of them indices.
    """

    def __init__(self, sees: Callable[..., Any], device: torch.device) -> None:
        self._sees, self._device = sees, device

    def window(self, layer: int) -> int | None:
        """Return how many keys a row sees at most, itself included; None is without limit.

        Raises UnsupportedModelError when that is not all there is to it; ``layer`` names the layer.
        """
        counts = [self._count(layer, row) for row in ASKED_ROWS]
        if counts == [row + 1 for row in ASKED_ROWS]:
            return None
        if all(
            count == min(counts[-1], row + 1) for count, row in zip(counts, ASKED_ROWS, strict=True)
        ):
            return counts[-1]
        raise _unsupported(f"layer {layer} attends in blocks, not causally in a window")

    def _count(self, layer: int, row: int) -> int:
        """Return how many keys a row sees, which must end with its own."""
        keys = torch.arange(row + 2, device=self._device)
        zero, asked = keys[:1], keys[row : row + 1]
        seen = torch.as_tensor(self._sees(zero, zero, asked, keys)).expand(row + 2)
        count = int(seen.sum())
        if bool(seen[row + 1]):
            raise _unsupported(f"layer {layer} attends to later tokens")
        if not bool(seen[row + 1 - count : row + 1].all()):
            raise _unsupported(f"layer {layer} does not attend to a run of tokens")
        return count


def _unsupported(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(why, ReasonCode.UNSUPPORTED_ATTENTION)


def record_sight(
    *_: Any, mask_function: Callable[..., Any], device: torch.device, **__: Any
) -> AttentionWindow:
    """The registered mask function."""
    return AttentionWindow(mask_function, device)
