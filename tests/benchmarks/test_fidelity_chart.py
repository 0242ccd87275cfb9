"""The chart of fidelity shows what was measured, with names that can be read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.benchmarks.fidelity_chart import GAP, _apart, chart, lines_of, settings_of


def row(lead_in, selector, compute, kl, *, default=False, setting="adjacent"):
    return {
        "setting": setting, "lead_in": lead_in, "selector": selector, "default": default,
        "compute_share": compute, "kl": kl, "kl_ci95": [kl / 2, kl * 2],
    }  # fmt: skip


RUN = {
    "model": "toy",
    "dtype": "float32",
    "prompts": {"adjacent": 3, "shuffled": 2},
    "rows": [
        row("none", "full", 1.0, 0.0),
        row("none", "no_context", 0.03, 5.0),
        row("document", "hkvd", 0.3, 0.015, default=True),
        row("document", "hkvd", 0.4, 0.01),
        row("document", "hkvd", 0.2, 0.02),
        row("instruction", "none", 0.05, 0.3),
        {"setting": "adjacent", "lead_in": "none", "selector": "prefix_caching"},
    ],
}


def test_a_line_joins_the_ratios_of_a_rule():
    lines = dict(lines_of(RUN, "adjacent"))
    assert list(lines) == [
        "no passages", "default (document, hkvd)", "document, hkvd", "instruction, none",
    ]  # fmt: skip
    assert [found["compute_share"] for found in lines["document, hkvd"]] == [0.2, 0.4]


def test_the_chart_names_models_settings_and_the_default():
    more = {**RUN, "rows": [row("document", "all", 1.0, 0.0, setting="shuffled")]}
    assert settings_of(more) == ["shuffled"]
    drawn = chart([RUN, more])
    assert drawn == chart([RUN, more])
    for text in (
        "demo (float32), adjacent, 3 prompts",
        "default (document, hkvd)",
        "demo (float32), shuffled",
    ):
        assert f"<!-- {text}" in drawn


@pytest.mark.parametrize("heights", [[0.1, 0.1, 0.1], [0.98, 0.99, 1.0], [0.1, 0.5, 0.9]])
def test_names_keep_a_distance(heights):
    found = _apart(heights)
    assert max(found) <= 1.0
    assert all(b - a >= GAP - 1e-9 for a, b in pairwise(found))
    assert _apart([0.1, 0.5, 0.9]) == [0.1, 0.5, 0.9]
