"""The interface of CUDA graphs of layers to the blend pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Rows


class GraphedRows(Protocol):
    """Runs layers on the rows of one prompt as CUDA graphs, their attention included."""

    def run(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Run one layer on ``hidden`` (1, rows, hidden), and write the rows' fresh KV.

        Returns hidden states that are valid until the next run; None if the layer has to be run
        without a graph.
        """


Graphed = Callable[[Rows, FusedKV], GraphedRows | None]
"""Returns what runs layers on rows of a prompt by graphs; None if they are to be run without."""
