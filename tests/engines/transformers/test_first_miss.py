"""The one warning of a prompt of which nothing is reused though chunks were expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, Chunk, SamplingParams
from tests.engines.transformers.conftest import EngineFactory
from tests.models import words

SHORT = SamplingParams(max_tokens=1)
PASSAGE, OTHER = words(40, 3), words(40, 9)
QUESTION = f" {words(5, 20)}"
HINTED: Mapping[str, Any] = {"hints": [Chunk(PASSAGE)]}
TOO_SHORT: Mapping[str, Any] = {"config": BlendConfig(min_tokens=256)}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("nothing was reused")]


@pytest.mark.parametrize(
    ("stored", "is_computed", "asked", "options", "cause"),
    [
        (OTHER, True, PASSAGE, HINTED, "never given to precompute"),
        (PASSAGE, True, PASSAGE[:60], HINTED, "cut, or changed by a template"),
        (PASSAGE, False, PASSAGE, {}, "never computed, or was evicted"),
        (PASSAGE, True, PASSAGE, TOO_SHORT, "40 reusable tokens are fewer than min_tokens=256"),
    ],
)
def test_a_miss_is_warned_of_once_with_its_cause(
    make_engine: EngineFactory,
    caplog: pytest.LogCaptureFixture,
    stored: str,
    is_computed: bool,
    asked: str,
    options: Mapping[str, Any],
    cause: str,
) -> None:
    engine = make_engine()
    engine.precompute([Chunk(stored)], progress=False, register_only=not is_computed)
    for _ in range(2):
        engine.generate(asked + QUESTION, SHORT, **options)
    (warning,) = warnings(caplog)
    assert cause in warning
