"""A union of selectors: shares of a budget, needs of its members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blend.schedule import top_rows
from cacheblend_rag.blend.selectors import Evidence, make_selector
from cacheblend_rag.errors import ConfigError
from tests.blend.test_selectors import TOKENS, evidence

RANKING = ("hkvd", "prior", "question", "question_prior", "chunk_head", "random")


@pytest.mark.parametrize("name", RANKING)
def test_a_union_of_one_is_that_one(name: str) -> None:
    union, one = make_selector("union", {"members": {name: 1.0}}), make_selector(name)
    for count in range(TOKENS + 1):
        rows = [top_rows(each.score(evidence()), count).tolist() for each in (union, one)]
        assert rows[0] == rows[1]
    needs = ("needs_fresh_kv", "needs_question", "needs_prior", "fixed_ratio")
    assert [getattr(union, need) for need in needs] == [getattr(one, need) for need in needs]


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_members_get_their_shares_of_any_number_of_tokens(
    tenths: int, count: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    prior, question = torch.rand(2, 60, generator=draw).unbind()
    members = {"question": tenths / 10, "prior": 1 - tenths / 10}
    seen = Evidence(torch.arange(60), prior, question)
    taken = set(top_rows(make_selector("union", {"members": members}).score(seen), count).tolist())
    assert len(taken) == count
    for scores, share in ((question, members["question"]), (prior, members["prior"])):
        own = set(top_rows(scores, int(share * count + 1e-9)).tolist())
        assert own <= taken


def test_tokens_that_no_member_takes_are_not_taken() -> None:
    members = {"chunk_head": 0.5, "prior": 0.5}
    options = {"chunk_head": {"tokens": 1}}
    union = make_selector("union", {"members": members, "options": options})
    offsets = torch.tensor([0, 1, 2, 0, 1])
    prior = torch.tensor([0.0, -torch.inf, 3.0, 1.0, -torch.inf])
    scores = union.score(Evidence(offsets, prior))
    assert top_rows(scores, 5).tolist() == [0, 2, 3]


def test_a_union_needs_what_its_members_need() -> None:
    union = make_selector("union", {"members": {"hkvd": 0.6, "question": 0.4}})
    assert (union.needs_fresh_kv, union.needs_question, union.needs_prior) == (True, True, False)
    plain = make_selector("union", {"members": {"chunk_head": 0.6, "random": 0.4}})
    assert (plain.needs_fresh_kv, plain.needs_question, plain.needs_prior) == (False, False, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": {}}, "members={} must hold shares above 0 that add up to 1"),
        ({"members": {"prior": 0.5}}, "that add up to 1"),
        ({"members": {"prior": "all"}}, "must hold shares"),
        ({"members": ["prior"]}, "must hold shares"),
        ({"members": {"best": 1.0}}, "selector='best' must be one of"),
        ({"members": {"none": 0.5, "prior": 0.5}}, "'none' ranks nothing"),
        ({"members": {"prior": 1.0}, "options": {"random": {}}}, "options of 'random'"),
        ({"members": {"random": 1.0}, "options": {"random": {"k": 1}}}, "random has no 'k'"),
    ],
)
def test_wrong_members_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_selector("union", options)
