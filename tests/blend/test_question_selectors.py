"""The selector that ranks by the question's attention, and what it observes."""

from __future__ import annotations

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.selectors import SELECTORS, Probe, make_selector
from cacheblend_rag.errors import ConfigError


def test_it_needs_kv_up_to_its_last_observed_layer() -> None:
    selector = make_selector("question_mid")
    assert selector.needs_question
    assert selector.probe == Probe((0.4, 0.75), None, "sum")
    assert selector.kv_before(40) == 0.75
    deep = make_selector("question_mid", {"span": [0.5, 1.0], "heads": "max"})
    assert deep.probe == Probe([0.5, 1.0], None, "max")
    assert deep.kv_before(40) == 1.0
    assert make_selector("question_mid", {"layers": [1, 4]}).kv_before(20) == 0.25


@pytest.mark.parametrize("name", [name for name in SELECTORS if name != "question_mid"])
def test_others_need_no_kv_before_layer_0(name: str) -> None:
    assert make_selector(name).kv_before(20) == 0.0


def test_a_layer_that_the_model_lacks_is_refused_before_work_begins() -> None:
    config = BlendConfig(selector="question_mid", selector_options={"layers": [4]})
    with pytest.raises(ConfigError, match="must be below the model's 4 layers"):
        plan_schedule(config, 4)
    assert plan_schedule(config, 5).selector.needs_question


def test_an_option_is_checked_and_an_unknown_one_is_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="heads='mean'"):
        make_selector("question_mid", {"heads": "mean"})
    with pytest.raises(ConfigError, match="question_mid has no 'k'; it takes: heads, layers, span"):
        make_selector("question_mid", {"k": 1})
    with pytest.raises(ConfigError, match="all has no 'k'; it takes none"):
        make_selector("all", {"k": 1})
