"""Masks are made once for the rows of a pass, within a bound."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import torch

from cacheblend_rag.blend.attention import MaskCache
from cacheblend_rag.blend.rows import Rows

CPU = torch.device("cpu")


def rows_at(*places: int) -> Rows:
    return Rows.at(np.array(places), CPU)


def test_a_mask_is_made_once_for_its_rows_and_name() -> None:
    made: list[int] = []

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size)

    kept, one, other = MaskCache(), rows_at(1), rows_at(1)
    first = kept.get(one, "a", partial(make, 1))
    assert kept.get(one, "a", partial(make, 2)) is first
    assert kept.get(one, "b", partial(make, 3)) is not first
    assert kept.get(other, "a", partial(make, 4)) is not first, "other rows, though alike"
    assert made == [1, 3, 4]
    assert kept.nbytes == 4 * (1 + 3 + 4)


def test_masks_go_with_their_rows() -> None:
    kept, rows = MaskCache(), rows_at(1, 2)
    kept.get(rows, "a", lambda: torch.zeros(10))
    assert kept.nbytes == 40
    del rows
    gc.collect()
    assert kept.nbytes == 0


def test_masks_beyond_the_bound_are_not_kept_and_evict_none() -> None:
    kept, rows = MaskCache(most_bytes=40), rows_at(1)
    small = kept.get(rows, "small", lambda: torch.zeros(8))
    large = kept.get(rows, "large", lambda: torch.zeros(3))
    assert kept.get(rows, "large", lambda: torch.zeros(3)) is not large
    assert kept.get(rows, "small", lambda: torch.zeros(8)) is small
    exact = kept.get(rows, "exact", lambda: torch.zeros(2))
    assert kept.get(rows, "exact", lambda: torch.zeros(2)) is exact
