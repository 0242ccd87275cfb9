from __future__ import annotations

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.rules import Rule, complete, default_rules, grid_rules
from cacheblend_rag.settings import BlendConfig
from tests.toy.questions import toy_dataset


def test_default_plan_fits_each_setting():
    data = toy_dataset([], 1, 1)
    plans = {setting: default_rules(setting, data.of_setting(setting)) for setting in data.settings}
    assert list(plans) == ["adjacent", "fragments", "shuffled"]
    required = {
        ("instruction", "none", 0.0), ("document", "none", 0.0), ("instruction", "hkvd", 0.15),
        ("instruction", "prior", 0.15), ("instruction", "random", 0.15),
    }  # fmt: skip
    for rules in plans.values():
        assert required <= {(r.lead_in, r.selector, r.ratio) for r in rules}
        assert len(rules) == len(set(rules))
    assert {
        ("instruction", selector, ratio)
        for selector in ("prior", "random")
        for ratio in (0.05, 0.1, 0.15, 0.2, 0.25)
    } <= {(r.lead_in, r.selector, r.ratio) for r in plans["adjacent"]}


def test_any_option_makes_a_grid_of_all_three():
    rules = grid_rules([0.3], None, None)
    assert rules is not None
    assert [(r.lead_in, r.selector, r.ratio) for r in rules] == [
        (lead_in, selector, ratio)
        for lead_in in ("instruction", "document")
        for selector, ratio in (("none", 0.0), ("hkvd", 0.3), ("prior", 0.3), ("random", 0.3))
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, ["guess"], None), "selector='guess'"),
        ((None, None, ["preface"]), "lead_in='preface'"),
    ],
)
def test_grids_refuse_unknown_names(options, message):
    with pytest.raises(ConfigError, match=message):
        grid_rules(*options)


def test_no_option_is_no_grid():
    assert grid_rules(None, None, None) is None


BASE = BlendConfig(min_tokens=0)
DEFAULT = Rule.default()
ASKED = [Rule("instruction", "prior", 0.1), Rule("instruction", "hkvd", 0.2)]


def test_the_engines_defaults_are_always_among_the_rules():
    assert complete(ASKED, BASE, {}, fidelity=False) == [*ASKED, DEFAULT]
    same = Rule(DEFAULT.lead_in, DEFAULT.selector, DEFAULT.ratio)
    assert complete([same, *ASKED], BASE, {}, fidelity=False) == [DEFAULT, *ASKED]


@pytest.mark.parametrize(
    ("base", "options"),
    [(BASE, {DEFAULT.selector: {"deviation": "k"}}), (BASE.with_changes(check_layers=(2,)), {})],
)
def test_a_rule_with_other_settings_is_not_the_default(base, options):
    same = Rule(DEFAULT.lead_in, DEFAULT.selector, DEFAULT.ratio)
    assert complete([same], base, options, fidelity=False) == [same, DEFAULT]


def test_fidelity_is_held_against_reuse_and_random_rows():
    rules = complete(ASKED, BASE, {}, fidelity=True)
    assert rules == [
        Rule.reuse("instruction"),
        Rule.reuse("document"),
        Rule("instruction", "random", 0.1),
        Rule("instruction", "random", 0.2),
        Rule("document", "random", DEFAULT.ratio),
        *ASKED,
        DEFAULT,
    ]
    assert complete(rules, BASE, {}, fidelity=True) == rules
