from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.rules import Rule, complete, default_rules, grid_rules
from cacheblend_rag.settings import BlendConfig
from tests.toy.questions import toy_dataset


def test_default_rules_take_contexts_where_there_are_any():
    data = toy_dataset(["adjacent"], 1, 1)
    rules = default_rules(data.questions)
    assert len(rules) == len(set(rules))
    assert {"instruction", "document"} == {rule.lead_in for rule in rules}
    assert {"none", "hkvd", "prior", "question_mid", "random"} == {rule.selector for rule in rules}
    (asked,) = data.questions
    (document, *_), (passage, *_) = asked.documents, asked.passages
    alone = replace(asked, documents=(replace(document, chunks=(passage.text,)),))
    assert {rule.lead_in for rule in default_rules([alone])} == {"instruction"}


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
