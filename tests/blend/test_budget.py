"""How a number of rows is spent, against rules written out over lists."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.budget import Budget, fewest_with
from cacheblend_rag.blend.schedule import top_rows
from cacheblend_rag.errors import ConfigError

SCORES = st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 0.25, 1.0, 8.0]), min_size=1, max_size=24)
BUDGETS = st.builds(
    Budget,
    sigmas=st.none() | st.floats(-1, 1),
    mass=st.none() | st.floats(0, 1),
    per_chunk=st.sampled_from(["none", "equal", "mass"]),
    least=st.integers(0, 3),
)


def chosen(budget: Budget, scores: list[float], chunks: list[int], count: int) -> list[int]:
    taken: list[int] = budget.rows(torch.tensor(scores), torch.tensor(chunks), count).tolist()
    return taken


@given(BUDGETS, SCORES, st.integers(0, 30), st.data())
@settings(max_examples=150, deadline=None)
def test_a_budget_is_never_exceeded_and_takes_the_best_of_each_chunk(
    budget: Budget, scores: list[float], count: int, data: st.DataObject
) -> None:
    chunks = data.draw(
        st.lists(st.integers(0, 3), min_size=len(scores), max_size=len(scores)).map(sorted)
    )
    taken = chosen(budget, scores, chunks, count)
    assert taken == sorted(set(taken))
    assert len(taken) <= count
    assert all(scores[token] > -math.inf for token in taken)
    for chunk in set(chunks):
        own = [token for token, of in enumerate(chunks) if of == chunk]
        best = sorted((t for t in own if scores[t] > -math.inf), key=lambda t: -scores[t])
        mine = [token for token in taken if chunks[token] == chunk]
        assert sorted(best[: len(mine)]) == mine


@given(SCORES, st.integers(0, 30))
def test_without_rules_the_best_of_the_prompt_are_taken(scores: list[float], count: int) -> None:
    plain = top_rows(torch.tensor(scores), count).tolist()
    assert chosen(Budget(), scores, [0] * len(scores), count) == plain
    assert Budget().rows(torch.tensor(scores), None, count).tolist() == plain


def test_a_threshold_lets_only_scores_far_above_the_mean_pass() -> None:
    scores = [0.0, 0.0, 0.0, 4.0, 0.0, 6.0, -math.inf, 0.0]
    mean = 10 / 7
    sigma = math.sqrt(sum((score - mean) ** 2 for score in scores if score > -math.inf) / 7)
    assert [score > mean + sigma for score in scores] == [i in (3, 5) for i in range(8)]
    assert chosen(Budget(sigmas=1.0), scores, [0] * 8, 8) == [3, 5]
    assert chosen(Budget(sigmas=1.0), scores, [0] * 8, 1) == [5]
    assert chosen(Budget(sigmas=1.5), scores, [0] * 8, 8) == [5]
    assert chosen(Budget(sigmas=3.0), scores, [0] * 8, 8) == []


@pytest.mark.parametrize(
    ("mass", "taken"), [(0.0, []), (0.4, [5]), (0.61, [3, 5]), (0.9, [0, 3, 5]), (1.0, [0, 3, 5])]
)
def test_the_fewest_tokens_that_hold_a_share(mass: float, taken: list[int]) -> None:
    scores = [2.0, 0.0, 0.0, 4.0, 0.0, 6.0]
    assert chosen(Budget(mass=mass), scores, [0] * 6, 6) == taken
    assert fewest_with(torch.tensor(scores), mass).nonzero()[:, 0].tolist() == taken


def test_chunks_share_a_budget_equally_or_by_their_mass() -> None:
    chunks = [0] * 4 + [1] * 4 + [2] * 2
    scores = [9.0, 8.0, 7.0, 6.0, 1.0, 2.0, 3.0, 4.0, 0.5, 0.5]
    taken = {
        rule: chosen(Budget(per_chunk=rule), scores, chunks, 6)
        for rule in ("none", "equal", "mass")
    }
    assert taken["none"] == [0, 1, 2, 3, 6, 7]
    assert taken["equal"] == [0, 1, 6, 7, 8, 9]
    # 30, 10 and 1 of 41: four, one and none of six by themselves, and the last one to the best
    assert taken["mass"] == [0, 1, 2, 3, 6, 7]
    assert chosen(Budget(per_chunk="equal"), scores, chunks, 9) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    flat = [1.0] * 10
    assert chosen(Budget(per_chunk="mass"), flat, chunks, 5) == [0, 1, 4, 5, 8]


def test_each_chunk_gets_its_least_even_below_a_threshold() -> None:
    chunks, scores = [0, 0, 0, 1, 1, 2, 2], [9.0, 8.0, 7.0, 1.0, 2.0, 0.0, 0.5]
    assert chosen(Budget(least=1), scores, chunks, 4) == [0, 1, 4, 6]
    assert chosen(Budget(least=1, sigmas=0.5), scores, chunks, 7) == [0, 1, 2, 4, 6]
    assert chosen(Budget(least=2), scores, chunks, 5) == [0, 1, 2, 4, 6], "one each, as it reaches"
    assert chosen(Budget(least=9), scores, chunks, 2) == [0, 1], "less than one each"


def test_negative_scores_have_a_mass_above_the_lowest() -> None:
    assert chosen(Budget(mass=0.5), [-3.0, -1.0, -2.0], [0] * 3, 3) == [1]


def test_a_request_sets_the_rules() -> None:
    rules: dict[str, Any] = {"score_sigmas": 0.5, "score_mass": 0.9, "chunk_min_rows": 2}
    planned = plan_schedule(BlendConfig(chunk_budget="mass", **rules), 4)
    assert planned.budget == Budget(0.5, 0.9, "mass", 2)
    everything = plan_schedule(BlendConfig(recompute_ratio=1.0, **rules), 4)
    assert everything.recomputes_all


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_sigmas": float("nan")}, "score_sigmas=nan must be a number of at least 0"),
        ({"score_mass": 1.5}, "score_mass=1.5 must be a number from 0 to 1"),
        ({"chunk_budget": "fair"}, "chunk_budget='fair' must be one of none, equal, mass"),
        ({"chunk_min_rows": -1}, "chunk_min_rows=-1 must be an integer of at least 0"),
    ],
)
def test_wrong_rules_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendConfig(**settings)
