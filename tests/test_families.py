"""Families that the embedded engine blends, each held against its own model; see families.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.families import LowRow, Row, measure_low, try_all

BLENDED = (
    "afmoe", "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4",
    "exaone_moe", "gemma3, linear", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite",
    "granite_swa", "helium", "hyperclovax", "llama, biases",
    "llama, part of a head", "minimax_m2", "mixtral, window", "nanochat", "nemotron", "olmo2",
    "olmo3", "phi", "phimoe", "qwen2, window", "qwen2_moe", "qwen2_vl", "qwen3_vl", "seed_oss",
    "smollm3", "stablelm, parallel", "starcoder2", "vaultgemma",
)  # fmt: skip
IN_BFLOAT16 = (
    "cohere2", "gemma2", "gemma3, linear", "glm4", "gpt_neox", "granite", "llama, biases",
    "llama, yarn", "modernbert-decoder", "olmo2", "phi3, window", "qwen2", "qwen3_moe", "smollm3",
    "starcoder2",
)  # fmt: skip
"""All of them are tried by ``python -m tests.families --dtype bfloat16``."""
REFUSED = {
    "bloom": "ALiBi",
    "gpt2": "learned positions",
    "mpt": "ALiBi",
    "phi3, longrope": "longrope",
}


@pytest.mark.parametrize("name", BLENDED)
def test_a_family_is_blended_as_its_own_model_computes(name: str) -> None:
    (row,) = try_all([name])
    assert isinstance(row, Row)
    assert row.refusal is None
    assert row.everything is not None
    assert row.nothing is not None
    assert row.moved is not None
    assert max(row.everything, row.nothing) < 1e-5
    assert row.moved < 1e-3, "far positions are rounded by the model itself"
    assert row.greedy == 16


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_family_with_outliers_is_as_precise_in_bfloat16_as_its_own_model(name: str) -> None:
    (row,) = try_all([name], partial(measure_low, dtype=torch.bfloat16))
    assert isinstance(row, LowRow)
    assert row.refusal is None
    assert row.own is not None
    assert row.everything is not None
    assert row.nothing is not None
    assert row.moved is not None
    assert max(row.everything, row.nothing) < 1.5 * row.own
    assert row.moved < 0.03, "four roundings of a key, by position and place"


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_refused_answers_as_its_own_model(name: str) -> None:
    (row,) = try_all([name])
    assert isinstance(row, Row)
    assert REFUSED[name] in str(row.refusal)
    assert row.greedy == 16
