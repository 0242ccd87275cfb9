"""The positions of the tokens that a pass computes, on the device and on the host.

The host decides the rows, once per pass and check layer. So their bounds, runs and cost are Python
numbers, and no layer has to synchronize with an accelerator to get them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens at increasing positions.

    host: (rows,) int64. device: the same on the model's device.
    """

    host: Positions
    device: Tensor
    _pairs: dict[int | None, float] = field(init=False, default_factory=dict)

    @classmethod
    def at(cls, positions: Positions, device: torch.device) -> Rows:
        """Return the rows at these positions, (rows,) int64."""
        return cls(positions, torch.from_numpy(positions).to(device, non_blocking=True))

    @classmethod
    def where(cls, mask: Mask, device: torch.device) -> Rows:
        """Return the rows at the positions where ``mask``, (tokens,), is set."""
        return cls.at(np.flatnonzero(mask), device)

    def __len__(self) -> int:
        return len(self.host)

    @property
    def first(self) -> int:
        """The first row's position."""
        return int(self.host[0])

    @property
    def last(self) -> int:
        """The last row's position."""
        return int(self.host[-1])

    @property
    def is_run(self) -> bool:
        """Whether they are contiguous."""
        return self.last - self.first + 1 == len(self.host)

    def part(self, start: int, stop: int) -> Rows:
        """Return the rows with indices ``start`` to ``stop`` - 1."""
        if start == 0 and stop >= len(self.host):
            return self
        return Rows(self.host[start:stop], self.device[start:stop])

    def blocks(self, most: int) -> Iterator[tuple[int, Rows]]:
        """Yield (index of the first row, rows) of even blocks of at most ``most`` rows."""
        rows, count = len(self.host), -(-len(self.host) // most)
        edges = [rows * i // count for i in range(count + 1)] if count else []
        for start, stop in itertools.pairwise(edges):
            yield start, self.part(start, stop)

    def pairs(self, window: int | None) -> float:
        """Return how many keys the rows see in total, each at most ``window``, itself included."""
        if window not in self._pairs:
            seen = self.host + 1
            self._pairs[window] = float(
                (seen if window is None else np.minimum(seen, window)).sum()
            )
        return self._pairs[window]


def token_tensor(token_ids: Sequence[int], device: torch.device) -> Tensor:
    """Return the ids as (tokens,) int64 on a device, faster than `torch.tensor` does for a list."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    return torch.from_numpy(ids).to(device)
