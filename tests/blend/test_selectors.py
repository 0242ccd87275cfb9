"""Selectors and schedules: one shared matrix, then what each rule is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blend.schedule import row_count, top_rows
from cacheblend_rag.blend.selectors import Evidence, make_selector

TOKENS = 12


def evidence() -> Evidence:
    draw = torch.Generator().manual_seed(1)

    def kv() -> torch.Tensor:
        return torch.rand(2, TOKENS, 4, generator=draw)

    return Evidence(
        offsets=torch.arange(TOKENS) % 5,
        prior=torch.rand(TOKENS, generator=draw),
        question_attention=torch.rand(TOKENS, generator=draw),
        fresh=(kv(), kv()),
        cached=(kv(), kv()),
    )


@pytest.mark.parametrize("deviation", ["k", "v"])
def test_ranks_that_share_the_heads_score_as_one(deviation: str) -> None:
    """What a rank adds up of its own heads is completed by what the other adds up of its."""
    whole = evidence()
    selector = make_selector("hkvd", {"deviation": deviation})
    sums: list[torch.Tensor] = []

    def half(heads: slice, total: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        fresh, cached = ((kv[0][heads], kv[1][heads]) for kv in (whole.fresh, whole.cached) if kv)
        return selector.score(Evidence(whole.offsets, fresh=fresh, cached=cached, total=total))

    def note(part: torch.Tensor) -> torch.Tensor:
        sums.append(part)
        return part

    half(slice(1, 2), note)
    others = iter(sums)
    shared = half(slice(0, 1), lambda part: part + next(others))
    torch.testing.assert_close(shared, selector.score(whole))


@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_token_scores_the_mean_of_its_neighbours(reach: int) -> None:
    asked = evidence().question_attention
    assert asked is not None
    found = make_selector("question_mid", {"reach": reach}).score(evidence())
    wanted = [float(asked[max(0, i - reach) : i + reach + 1].mean()) for i in range(TOKENS)]
    assert found.tolist() == pytest.approx(wanted)


@given(st.lists(st.sampled_from([-torch.inf, 0.0, 0.5, 1.0]), max_size=30), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_top_rows_are_the_best_in_order(values: list[float], count: int) -> None:
    scores = torch.tensor(values)
    rows = top_rows(scores, count).tolist()
    finite = sum(v > -torch.inf for v in values)
    assert rows == sorted(set(rows))
    assert len(rows) == min(count, finite)
    dropped = [v for i, v in enumerate(values) if i not in rows]
    assert not rows or not dropped or min(values[i] for i in rows) >= max(dropped)


@pytest.mark.parametrize(
    ("ratio", "tokens", "rows"), [(0, 10, 0), (1, 10, 10), (0.15, 4096, 615), (0.1, 30, 3)]
)
def test_row_count_rounds_up_without_rounding_noise(ratio: float, tokens: int, rows: int) -> None:
    assert row_count(ratio, tokens) == rows
