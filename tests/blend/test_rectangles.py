"""Attention in rectangles against plain attention in double precision, and where it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blend import rectangles, row_attention
from cacheblend_rag.blend.attention import attend_rows
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.masks import MaskCache
from cacheblend_rag.blend.rectangles import _parts, attend_by_rectangles, prefers_rectangles
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 8, 400
SCATTERED = Rows.at(np.arange(3, TOKENS, 3), CPU)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
REAL = {
    name: getattr(rectangles, name)
    for name in ("LEAF_KEYS", "LEAST_HALVED", "LEAF_ROWS", "LEAF_ROWS_16_BIT")
}

Drawn = st.sets(st.integers(0, TOKENS - 1), min_size=1)


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Any:
    """Rows are halved down to a few rows and keys, as in prompts of thousands of tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rectangles, "LEAF_KEYS", 40)
        patch.setattr(rectangles, "LEAST_HALVED", 3)
        patch.setattr(rectangles, "LEAF_ROWS", 5)
        patch.setattr(rectangles, "LEAF_ROWS_16_BIT", 7)
        patch.setattr(row_attention, "prefers_matmul", lambda *_: False)
        yield


def inputs(
    rows: Rows,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 1,
    kv_heads: int = KV_HEADS,
    width: int = WIDTH,
    tokens: int = TOKENS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries as a model's layers view them; keys and values with room behind for later tokens."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, len(rows), HEADS, width, generator=draw).to(dtype).transpose(1, 2)
    shape = (2, batch, kv_heads, tokens + 9, width)
    keys, values = torch.randn(shape, generator=draw).to(dtype)
    for part in (keys, values):
        part[:, :, rows.last + 1 :] = torch.nan
    return query, keys[:, :, :tokens], values[:, :, :tokens]


def wanted_of(parts: tuple[torch.Tensor, ...], rows: Rows, scaling: float) -> torch.Tensor:
    query, keys, values = (part.double() for part in parts)
    return attend_rows(query, keys, values, rows, scaling=scaling)


@settings(deadline=None)
@given(
    Drawn, st.sampled_from(list(TOLERANCE)), st.sampled_from([1, 2, 4]), st.sampled_from([7, 80])
)
def test_scattered_rows_get_what_plain_attention_gives_them(
    positions: set[int], dtype: torch.dtype, kv_heads: int, width: int
) -> None:
    rows = Rows.at(np.array(sorted(positions)), CPU)
    parts = inputs(rows, dtype, batch=2, kv_heads=kv_heads, width=width)
    found = attend_by_rectangles(*parts, rows, scaling=0.3)
    assert found.dtype == dtype
    wanted = wanted_of(parts, rows, 0.3)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("start", "stop"), [(0, TOKENS), (37, 211), (37, 40), (399, 400)])
def test_runs_get_what_plain_attention_gives_them(
    start: int, stop: int, kv_heads: int, dtype: torch.dtype
) -> None:
    rows = Rows.at(np.arange(start, stop), CPU)
    parts = inputs(rows, dtype, batch=2, kv_heads=kv_heads)
    found = attend_by_rectangles(*parts, rows, scaling=0.3)
    assert found.dtype == dtype
    wanted = wanted_of(parts, rows, 0.3)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("step", [1, 7, 90])
def test_prompts_of_thousands_of_tokens(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in REAL.items():
        monkeypatch.setattr(rectangles, name, value)
    rows = Rows.at(np.arange(50, 5000, step), CPU)
    parts = inputs(rows, tokens=5000)
    found = attend_by_rectangles(*parts, rows, scaling=0.3)
    torch.testing.assert_close(found.double(), wanted_of(parts, rows, 0.3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [SCATTERED, Rows.at(np.arange(50, TOKENS), CPU)])
def test_large_logits_neither_overflow_nor_vanish(rows: Rows) -> None:
    parts = inputs(rows)
    found = attend_by_rectangles(*parts, rows, scaling=300.0)
    torch.testing.assert_close(found.double(), wanted_of(parts, rows, 300.0), atol=1e-3, rtol=0)


@settings(deadline=None)
@given(Drawn, st.integers(1, 9))
def test_each_row_gets_each_key_once(positions: set[int], leaf_rows: int) -> None:
    rows = Rows.at(np.array(sorted(positions)), CPU)
    seen = np.zeros((len(rows), TOKENS), dtype=int)
    begun = np.zeros(len(rows), dtype=bool)
    keys = np.arange(TOKENS)
    for part in _parts(rows, leaf_rows):
        own = rows.host[part.rows, None]
        visible = keys[None, part.keys] <= own
        assert part.is_masked or visible.all()
        assert (begun[part.rows] != part.is_first).all()
        if part.is_masked:
            assert len(own) <= leaf_rows
        begun[part.rows] = True
        seen[part.rows, part.keys] += visible
    assert (seen == (keys <= rows.host[:, None])).all()


def test_layers_share_masks_that_cover_few_keys() -> None:
    masks, parts = MaskCache(), inputs(SCATTERED)
    first = attend_by_rectangles(*parts, SCATTERED, scaling=0.3, masks=masks)
    kept = masks.nbytes
    whole = MaskCache()
    attend_rows(*parts, SCATTERED, scaling=0.3, masks=whole)
    assert 0 < kept < whole.nbytes / 4
    again = attend_by_rectangles(*parts, SCATTERED, scaling=0.3, masks=masks)
    assert masks.nbytes == kept
    torch.testing.assert_close(again, first, atol=0, rtol=0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call that attends in rectangles."""
    made: list[int] = []

    def noted(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        made.append(query.shape[2])
        return attend_by_rectangles(query, *rest, **named)

    monkeypatch.setattr(row_attention, "attend_by_rectangles", noted)
    return made


@pytest.mark.parametrize(
    ("options", "is_used"),
    [
        ({}, True),
        ({"window": TOKENS}, True),  # as good as none
        ({"window": 50}, False),
        ({"softcap": 2.0}, False),
        ({"sinks": torch.zeros(HEADS)}, False),
    ],
)
def test_plain_attention_of_long_prompts_is_computed_so(
    options: dict[str, Any], is_used: bool, calls: list[int]
) -> None:
    query, keys, values = inputs(SCATTERED)
    fused = FusedKV(Geometry(1, HEADS, KV_HEADS, WIDTH, torch.float32, CPU), TOKENS)
    fused.keys[0], fused.values[0] = keys[0], values[0]
    own = query[:, :KV_HEADS]
    call = AttentionCall(0, query, own, own, 0.3, **{"window": None, **options})
    found = RowAttention()(call, fused, SCATTERED)
    assert calls == [len(SCATTERED)] * is_used
    wanted = attend_rows(query, keys, values, SCATTERED, scaling=0.3, **{"window": None, **options})
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_it_is_not_used_where_it_gains_nothing_or_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = query, keys, values = inputs(SCATTERED)
    assert prefers_rectangles(*parts, TOKENS)
    assert not prefers_rectangles(*parts, rectangles.LEAF_KEYS)
    assert not prefers_rectangles(query.double(), keys.double(), values.double(), TOKENS)
    assert not prefers_rectangles(query, keys, values[..., :4], TOKENS)
    assert not prefers_rectangles(query.half(), keys, values, TOKENS)
    assert not prefers_rectangles(*(part.to("meta") for part in parts), TOKENS)
    for index in range(3):
        others = list(parts)
        others[index] = parts[index].mT.contiguous().mT
        assert not prefers_rectangles(*others, TOKENS), "rows must be contiguous"
        others[index] = parts[index].clone().requires_grad_()
        assert not prefers_rectangles(*others, TOKENS), "it has no gradients"
        with torch.no_grad():
            assert prefers_rectangles(*others, TOKENS)
    monkeypatch.setattr(rectangles, "OPERATOR", "of_another_version")
    assert not prefers_rectangles(*parts, TOKENS)
