"""Selectors that rank by the question's attention, and runs of tokens, on scores made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.schedule import top_rows
from cacheblend_rag.blend.selectors import SELECTORS, Evidence, Probe, make_selector
from cacheblend_rag.errors import ConfigError

FAMILY = ("question", "question_mid", "question_prior", "prophet", "infoflow", "fusion")


def evidence(
    attention: list[float], positions: list[int] | None = None, start: int = 0
) -> Evidence:
    """Tokens of one chunk at ``start``, or of the positions' runs."""
    where = torch.tensor(positions or list(range(start, start + len(attention))))
    return Evidence(
        offsets=where - start,
        question_attention=torch.tensor(attention),
        prior=torch.ones(len(attention)),
        positions=where,
    )


def chosen(name: str, seen: Evidence, count: int, **options: Any) -> list[int]:
    return top_rows(make_selector(name, options).score(seen), count).tolist()


@pytest.mark.parametrize(
    ("name", "probe", "read"),
    [
        ("question", Probe((0.5, 1.0), None, "max", "sum"), 1.0),
        ("question_prior", Probe((0.5, 1.0), None, "max", "sum"), 1.0),
        ("prophet", Probe((0.0, 1.0), None, "sum", "sum"), 1.0),
        ("question_mid", Probe((0.4, 0.75), None, "sum", "sum"), 0.75),
        ("fusion", Probe((0.4, 0.75), None, "sum", "sum"), 0.75),
        ("infoflow", Probe((0.6, 0.75), None, "sum", "norm"), 0.75),
    ],
)
def test_each_has_its_own_probe(name: str, probe: Probe, read: float) -> None:
    assert make_selector(name).probe == probe
    assert make_selector(name).kv_before(40) == read


@pytest.mark.parametrize("name", FAMILY)
def test_a_probe_is_set_by_options_and_needs_kv_up_to_its_last_layer(name: str) -> None:
    options = {"layers": [1, 4], "heads": "sum", "tokens": "norm", "draft": 0.25}
    selector = make_selector(name, options)
    assert selector.needs_question
    assert selector.probe == Probe(selector.probe.span, [1, 4], "sum", "norm", 0.25)
    assert selector.kv_before(20) == 0.25
    with pytest.raises(ConfigError, match="heads='mean'"):
        make_selector(name, {"heads": "mean"})


@pytest.mark.parametrize("name", [name for name in SELECTORS if name not in (*FAMILY, "union")])
def test_others_need_no_kv_before_layer_0(name: str) -> None:
    assert make_selector(name).kv_before(20) == 0.0


def test_a_layer_that_the_model_lacks_is_refused_before_work_begins() -> None:
    config = BlendConfig(selector="question_mid", selector_options={"layers": [4]})
    with pytest.raises(ConfigError, match="must be below the model's 4 layers"):
        plan_schedule(config, 4)
    assert plan_schedule(config, 5).selector.needs_question


def test_infoflow_may_skip_the_first_chunk() -> None:
    seen = Evidence(
        offsets=torch.tensor([1, 2, 0, 1, 0]),
        question_attention=torch.tensor([9.0, 8.0, 1.0, 2.0, 3.0]),
        positions=torch.tensor([5, 6, 7, 8, 10]),
    )
    assert chosen("infoflow", seen, 2) == [0, 1]
    assert chosen("infoflow", seen, 2, skip_first=True) == [3, 4]
    assert chosen("infoflow", seen, 5, skip_first=True) == [2, 3, 4], "the first never is"
    with pytest.raises(ConfigError, match="skip_first=1 must be true or false"):
        make_selector("infoflow", {"skip_first": 1})


ATTENTION = [0.0, 0.0, 5.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.2, 0.0]
"""Mean 1.3, deviation 2.5: tokens 2, 5 and 9 exceed the mean by half of it."""


def test_fusion_takes_the_most_attended_run_with_what_is_around_it() -> None:
    seen = evidence(ATTENTION)
    assert chosen("fusion", seen, 6) == [1, 2, 3, 4, 5, 6], "5 + 4, joined over 2 tokens, before 8"
    assert chosen("fusion", seen, 9) == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert chosen("fusion", seen, 10) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11], "the rest by attention"
    assert chosen("fusion", seen, 2) == [2, 5], "of a run that does not fit the most attended"


def test_fusion_by_its_options() -> None:
    seen = evidence(ATTENTION)
    assert chosen("fusion", seen, 3, gap=1) == [8, 9, 10], "runs apart: 8, 5, 4"
    assert chosen("fusion", seen, 2, gap=1, around=0) == [2, 9]
    assert chosen("fusion", seen, 1, sigma=2.0) == [9]
    assert chosen("fusion", seen, 4, sigma=2.0) == [2, 8, 9, 10], "one run only, then the best"
    apart = evidence(ATTENTION[:6], [2, 3, 4, 5, 6, 8])
    assert chosen("fusion", apart, 1, sigma=0.0) == [2], "a position that is no candidate is a gap"
    for options in ({"gap": -1}, {"around": 0.5}, {"sigma": "1"}):
        (name,) = options
        with pytest.raises(ConfigError, match=f"^{name}="):
            make_selector("fusion", options)


def test_fusion_of_no_token_is_nothing() -> None:
    assert make_selector("fusion").score(evidence([])).tolist() == []


def test_a_union_observes_what_its_members_observe() -> None:
    options = {"question": {"layers": [1, 2], "heads": "sum"}}
    union = make_selector("union", {"options": options})
    assert union.probe == Probe(layers=[1, 2], heads="sum")
    assert union.kv_before(6) == 0.5
    plain = make_selector("union", {"members": {"prior": 0.5, "random": 0.5}})
    assert plain.kv_before(6) == 0.0
    with pytest.raises(ConfigError, match="observe different attention of the question: give"):
        make_selector("union", {"members": {"question": 0.5, "prophet": 0.5}})


# Neighbours, of any selector


def spread(scores: list[float], positions: list[int] | None = None, **options: int) -> list[float]:
    found: list[float] = (
        make_selector("question", options).score(evidence(scores, positions)).tolist()
    )
    return found


def test_neighbours_rank_as_high_as_the_token_between_them() -> None:
    assert spread([0, 3, 0, 0, 0, 5.0], neighbours=1) == [3, 3, 3, 0, 5, 5]
    assert spread([0, 3, 0, 0, 0, 5.0], neighbours=2) == [3, 3, 3, 5, 5, 5]
    assert spread([0, 3, 0.0], [4, 5, 7], neighbours=1) == [3, 3, 0], "by position, not by index"


def test_gaps_of_a_few_tokens_are_joined_at_the_lower_side() -> None:
    scores = [1.0, 0, 0, 4, 0, 0, 0, 2]
    assert spread(scores, gap=1) == scores
    assert spread(scores, gap=2) == [1, 1, 1, 4, 0, 0, 0, 2]
    assert spread(scores, gap=3) == [1, 1, 1, 4, 2, 2, 2, 2]
    assert spread([1.0, 0, 1], [4, 5, 8], gap=2) == [1, 0, 1], "two of the three are candidates"
    assert spread([1.0, 0, 1], [4, 5, 8], gap=3) == [1, 1, 1]


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=20),
    st.integers(1, 4),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_joined_scores_have_no_gap_at_any_threshold(
    scores: list[float], gap: int, data: st.DataObject
) -> None:
    found = torch.tensor(spread(scores, gap=gap))
    threshold = data.draw(st.sampled_from([1.0, 2.0, 3.0]))
    before = {i for i, score in enumerate(scores) if score >= threshold}
    after = {i for i, score in enumerate(found.tolist()) if score >= threshold}
    between = {
        i for a in before for b in before if b - a <= gap + 1 for i in range(a, b + 1)
    }  # fmt: skip
    assert after == before | between


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_takes_neighbours_and_asks_for_what_it_asked_for(name: str) -> None:
    alone, wide = make_selector(name), make_selector(name, {"neighbours": 1})
    for fact in ("needs_fresh_kv", "needs_question", "needs_prior", "fixed_ratio", "probe"):
        assert getattr(wide, fact) == getattr(alone, fact)
    assert wide.kv_before(8) == alone.kv_before(8)


def test_a_token_that_never_is_recomputed_is_no_neighbour() -> None:
    seen = evidence([0.0] * 4)
    found = make_selector("chunk_head", {"tokens": 2, "neighbours": 2}).score(seen)
    assert found.tolist() == [0, 0, -torch.inf, -torch.inf]
    assert make_selector("random", {"gap": 1}).score(evidence([])).tolist() == []


@pytest.mark.parametrize("option", ["neighbours", "gap"])
@pytest.mark.parametrize("value", [-1, 0.5, True, "1"])
def test_neighbours_are_counted(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option}={value!r} must be an integer of at least 0"):
        make_selector("prior", {option: value})


def test_an_unknown_option_is_told_with_those_of_every_selector() -> None:
    with pytest.raises(ConfigError, match="random has no 'k'; it takes: seed, neighbours, gap"):
        make_selector("random", {"k": 1})
    with pytest.raises(ConfigError, match=r"tokens, neighbours$"):
        make_selector("fusion", {"k": 1})
