"""The attention kernel, in Triton's interpreter, against PyTorch; run by test_scattered.py.

The interpreter computes with float32 where a GPU has 16 bits: this tests which keys a row sees, the
softmax, sinks and where results go, not rounding or speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.blend import row_attention
from cacheblend_rag.blend.attention import attend_rows
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.kernels.scattered import Tile, attend_scattered
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry

CPU = torch.device("cpu")
AFTER = 5
"""Tokens after the last row's, which hold no numbers."""
KINDS = {
    "float32": (torch.float32, 2e-5),
    "float16": (torch.float16, 4e-3),
    "bfloat16": (torch.bfloat16, 3e-2),
}


@dataclass(frozen=True)
class Case:
    """kv_heads, copies, head_dim: of the heads. padding: rows without a token."""

    kind: str
    kv_heads: int
    copies: int
    head_dim: int
    tokens: int
    places: tuple[int, ...]
    window: int | None
    softcap: float | None
    has_sinks: bool
    padding: int
    tile: Tile | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(1, 150))
    count = draw(st.integers(1, min(tokens, 40)))
    seed = draw(st.integers(0, 9_999))
    places = np.random.default_rng(seed).choice(tokens, count, replace=False)
    if draw(st.booleans()) and count > 1:  # a run
        places = np.arange(count) + tokens - count
    return Case(
        kind=draw(st.sampled_from(list(KINDS))),
        kv_heads=draw(st.integers(1, 3)),
        copies=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
        tokens=tokens,
        places=tuple(sorted(places.tolist())),
        window=draw(st.sampled_from([None, None, 1, 7, 48])),
        softcap=draw(st.sampled_from([None, None, 1.5, 50.0])),
        has_sinks=draw(st.booleans()),
        padding=draw(st.sampled_from([0, 0, 1, 9])),
        tile=draw(st.sampled_from([None, *(Tile(m, n, 4, 2) for m, n in TILES)])),
        seed=seed,
    )


TILES = ((16, 16), (32, 16), (64, 32), (16, 64))


def check(case: Case) -> None:
    dtype, tolerance = KINDS[case.kind]
    draw = torch.Generator().manual_seed(case.seed)
    heads, count = case.kv_heads * case.copies, len(case.places)
    # as a model's projection gives it: heads of a row side by side
    query = torch.randn(1, count + case.padding, heads, case.head_dim, generator=draw)
    query = query.to(dtype).transpose(1, 2)
    shape = (2, 1, case.kv_heads, case.tokens + AFTER, case.head_dim)
    kv = torch.randn(shape, generator=draw)
    kv[:, :, :, case.places[-1] + 1 :] = torch.nan
    kv = kv.to(dtype)
    known = kv.float()
    sinks = torch.randn(heads, generator=draw) if case.has_sinks else None
    rows = Rows.at(np.array(case.places), CPU)
    own = query[:, : case.kv_heads]
    call = AttentionCall(0, query, own, own, case.head_dim**-0.5, case.window, case.softcap, sinks)
    places = torch.cat((rows.device, torch.full((case.padding,), -1)))
    found = attend_scattered(call, kv[0], kv[1], places, tile=case.tile)
    wide = replace(call, query=query[:, :, :count].float())
    wanted = attend_rows(wide, known[0], known[1], rows)
    assert found.dtype == dtype
    size = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found[:, :count].float(), wanted, atol=tolerance * size, rtol=0)
    assert not found[:, count:].any(), "padding gets zeros"


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_rows_get_what_attention_by_pytorch_gives_them(case: Case) -> None:
    check(case)


PLAIN = Case(
    kind="bfloat16", kv_heads=2, copies=4, head_dim=64, tokens=150, places=tuple(range(3, 150, 7)),
    window=None, softcap=None, has_sinks=False, padding=0, tile=None, seed=1,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"window": 20, "softcap": 2.0, "has_sinks": True, "padding": 3},
        {"copies": 7, "places": tuple(range(150))},
        {"head_dim": 80},
    ],
    ids=["plain", "everything", "a run", "padded head"],
)
def test_every_kind_of_number_is_attended_to(kind: str, given: dict[str, Any]) -> None:
    check(replace(PLAIN, kind=kind, **given))


class Fused(FusedKV):
    """Of one layer, with random KV."""

    @classmethod
    def random(cls, dtype: torch.dtype, tokens: int) -> Fused:
        fused = cls(Geometry(1, 6, 2, 64, dtype, CPU), tokens)
        draw = torch.Generator().manual_seed(3)
        fused.keys.copy_(torch.randn(fused.keys.shape, generator=draw))
        fused.values.copy_(torch.randn(fused.keys.shape, generator=draw))
        return fused


@pytest.mark.parametrize(("window", "softcap"), [(None, 5.0), (30, None), (1_000, 5.0)])
@pytest.mark.parametrize("places", [range(20, 90), range(1, 90, 3), range(89, 90)], ids=str)
def test_where_there_are_kernels_rows_attend_by_them(
    places: range, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    scattered = row_attention._attend_scattered

    def noted(*given: Any, **named: Any) -> torch.Tensor:
        used.append("scattered")
        return scattered(*given, **named)

    monkeypatch.setattr(row_attention, "_attend_scattered", noted)
    monkeypatch.setattr(row_attention, "has_kernels", lambda _: True)
    row_attention.works.cache_clear()
    fused, rows = Fused.random(torch.float16, 90), Rows.at(np.array(places), CPU)
    draw = torch.Generator().manual_seed(4)
    query = torch.randn(1, 6, len(rows), 64, generator=draw).half()
    call = AttentionCall(0, query, query[:, :2], query[:, :2], 0.3, window, softcap, None)
    found, known = RowAttention()(call, fused, rows), len(used)
    assert known == 2, "once to test it"
    torch.testing.assert_close(
        found, RowAttention(kernels=False)(call, fused, rows), atol=4e-3, rtol=2e-3
    )
    RowAttention()(call, fused, rows)
    assert len(used) == 3, "it is tested once"
