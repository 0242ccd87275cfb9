"""Traces over the wire: they come back as they were sent, and hostile ones are refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from cacheblend_rag.engines.vllm.protocol.result import BlendResult, Failed, params_of, result_of
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.trace import (
    MOST_LAYERS,
    MOST_SELECTIONS,
    MOST_TOKENS,
    Deviations,
    Trace,
    TracedLayer,
    TracedSelection,
    TracedTokens,
)
from tests.engines.vllm.protocol.test_result import HOSTILE, mutated

EARLY = TracedSelection(None, (3, 5, 9), scores=(0.5, -1.0, 0.25), chosen=(True, False, True))
AT_LAYER = TracedSelection(1, (3, 9), (0.0, 1.5), (1e-9, 3e38), (1e-9, 3e38), (False, True))
LAYER = TracedLayer(1, 3, Deviations(1.5, 1.0, 3e38, 9.0), Deviations(0.5, 0.25, 1.0, 4.0))
TOKENS = TracedTokens(1, (3, 9), (0.5, 1.5), (0.25, 1e-9))
TRACE = Trace(
    (EARLY, AT_LAYER), (3, 3, 1), truncated=True, layers=(LAYER,), tokens=TOKENS,
    protected=(4, 7),
)  # fmt: skip
RESULT = BlendResult(
    (ChunkReport("0" * 32, 3, 9, True, tier="host"),), starts={"load": 0.25}, trace=TRACE
)


def sent(trace: Any = TRACE) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(params_of(RESULT)))["cacheblend"]
    return plain if trace is TRACE else {**plain, "trace": trace}


def plain_trace(**changes: Any) -> dict[str, Any]:
    return {**sent()["trace"], **changes}


def plain_selection(**changes: Any) -> dict[str, Any]:
    return plain_trace(selections=[{**sent()["trace"]["selections"][1], **changes}])


def test_a_trace_survives_json() -> None:
    assert result_of({"cacheblend": sent()}) == RESULT


def test_a_result_without_a_trace_has_none_on_the_wire() -> None:
    assert "trace" not in params_of(replace(RESULT, trace=None))["cacheblend"]


LONG = list(range(MOST_TOKENS + 1))


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ([], "trace: Input should be"),
        (plain_trace(selections=sent()["trace"]["selections"] * MOST_SELECTIONS), "at most 8"),
        (plain_trace(rows=[1] * (MOST_LAYERS + 1)), "at most 1024"),
        (plain_trace(rows=[1, -1]), "trace.rows.1: Input should be greater than or equal to 0"),
        (plain_trace(layers=sent()["trace"]["layers"] * 2), "must be strictly rising"),
        (plain_trace(protected=LONG), "at most 4096"),
        (plain_selection(layer=MOST_LAYERS), "selections.0.layer: Input should be less than 1024"),
        (plain_selection(positions=[9, 3]), "must be strictly rising"),
        (plain_selection(positions=[3.5, 9]), "selections.0.positions.0"),
        (plain_selection(scores=[1.0]), "a score and a choice for each token"),
        (plain_selection(scores=[1.0, math.nan]), "finite number"),
        (plain_selection(scores=[1.0, 10**400]), "selections.0.scores.1"),
        (plain_selection(key_deviations=[]), "two deviations for each token"),
        (plain_selection(value_deviations=[1.0, -1.0]), "value_deviations.1: Input should be"),
    ],
)
def test_a_hostile_trace_is_a_failure_that_says_why(trace: Any, said: str) -> None:
    read = result_of({"cacheblend": sent(trace)})
    assert isinstance(read, Failed)
    assert said in read.error


def test_whatever_comes_as_a_trace_is_read_or_refused() -> None:
    draw = random.Random(5)
    kinds = set()
    for _ in range(2_000):
        read = result_of({"cacheblend": sent(mutated(sent()["trace"], draw, deepest=200))})
        kinds.add(type(read))
    assert kinds == {BlendResult, Failed}
    for value in HOSTILE:
        assert isinstance(result_of({"cacheblend": sent(value)}), BlendResult | Failed)


def test_a_trace_of_another_prompt_does_not_fit() -> None:
    assert TRACE.fits(10)
    assert not TRACE.fits(9)
    assert not Trace(rows=(11,)).fits(10)
    assert not Trace(protected=(10,)).fits(10)
    assert not Trace(tokens=TOKENS).fits(9)
    assert not Trace(layers=(LAYER,)).fits(2)
    assert Trace().fits(0)
