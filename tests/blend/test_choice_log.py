"""What is logged of a choice of rows, and that nothing is computed for it if nobody listens."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend_rag.blend.schedule import log_choice, logger
from cacheblend_rag.blend.selectors import make_selector
from tests.prefill.prompts import filled, finished, placed, prompt_pass

POSITIONS = np.array([3, 5, 8, 9])
SCORES = torch.tensor([0.5, 4.0, -torch.inf, 0.25])
HKVD, RANDOM = make_selector("hkvd", {}), make_selector("random", {})


@pytest.mark.parametrize(
    ("layer", "selector", "chosen", "said"),
    [
        (1, HKVD, [3, 5], "request r1: layer 1: 2 of 4 tokens chosen, deviation 0.5 - 4"),
        (None, RANDOM, [9], "request r1: before layer 0: 1 of 4 tokens chosen, score 0.25 - 0.25"),
        (1, HKVD, [], "request r1: layer 1: 0 of 4 tokens chosen"),
    ],
)
def test_a_choice_is_a_line_with_counts_and_the_range_of_the_chosen(
    layer: int | None, selector: Any, chosen: list[int], said: str, caplog: Any
) -> None:
    with caplog.at_level(logging.DEBUG, logger.name):
        log_choice(
            "r1", layer, selector, POSITIONS, SCORES, chosen=np.array(chosen, dtype=np.int64)
        )
    assert caplog.messages == [said]


def test_nothing_is_looked_at_unless_debug_is_on(caplog: Any) -> None:
    nothing: Any = object()  # every use of it would raise
    with caplog.at_level(logging.INFO, logger.name):
        log_choice("r1", 1, nothing, nothing, nothing, chosen=nothing)
    assert caplog.messages == []


def test_each_check_layer_of_a_pass_is_logged_with_its_request(caplog: Any) -> None:
    config = {"selector": "hkvd", "check_layers": (1, 2), "recompute_ratios": (0.5, 0.3)}
    work = prompt_pass(filled(placed()), placed(), options={"request_id": "r7"}, **config)
    with caplog.at_level(logging.DEBUG, logger.name):
        found = finished(work)
    recomputed = sum(chunk.recomputed for chunk in found.chunks)
    assert 0 < recomputed < 11
    assert [line.partition(" tokens chosen, deviation ")[0] for line in caplog.messages] == [
        "request r7: layer 1: 11 of 21",
        f"request r7: layer 2: {recomputed} of 11",
    ]
