"""Masks are made once for the rows of a pass, within a bound."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
import torch

from cacheblend_rag.blend import attention
from cacheblend_rag.blend.attention import MaskCache, attend_rows
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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_layers_share_masks_whatever_their_windows(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int | None] = []
    bias = attention.mask_of

    def noted(rows: Rows, seen: slice, window: int | None, **named: object) -> torch.Tensor:
        made.append(window)
        return bias(rows, seen, window, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "mask_of", noted)
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 100, 8, generator=draw)
    keys, values = (torch.randn(1, 2, 300, 8, generator=draw) for _ in range(2))
    rows, kept = Rows.at(np.arange(0, 300, 3), CPU), MaskCache()
    for window in (None, 50, None, 50):
        attend = partial(
            attend_rows, query, keys, values, rows, scaling=0.3, window=window, softcap=softcap
        )
        torch.testing.assert_close(attend(masks=kept), attend(), atol=0, rtol=0)
    # two blocks: each once for the cache in the first two layers, and each time without it
    assert len(made) == 2 * 2 + 4 * 2


def test_the_stride_of_a_mask_is_a_multiple_of_8() -> None:
    for count in (1, 8, 61):
        rows = Rows.at(np.arange(0, count), CPU)
        mask = attention.mask_of(rows, slice(0, count), None, copies=3, dtype=torch.float32)
        assert mask.shape == (3 * count, count)
        assert mask.stride(0) % 8 == 0
