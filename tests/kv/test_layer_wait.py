"""Waits for a layer, shared among the tiers that were waited for."""

from __future__ import annotations

import pytest

from cacheblend_rag.kv.timings import shared


@pytest.mark.parametrize(
    ("done", "wanted"),
    [
        ({"disk": 14.0}, {"disk": 10.0}),
        ({"host": 10.0, "disk": 18.0}, {"host": 0.0, "disk": 10.0}),
        ({"disk": 14.0, "redis": 18.0}, {"disk": 2.0, "redis": 8.0}),
        ({"host": 10.0, "disk": 10.0}, {"host": 5.0, "disk": 5.0}),
        ({"host": 10.0, "disk": 13.0, "redis": 20.0}, {"host": 0.0, "disk": 1.5, "redis": 8.5}),
        ({}, {}),
    ],
)
def test_a_wait_from_10_to_20_is_shared(done: dict[str, float], wanted: dict[str, float]) -> None:
    assert shared(10.0, 20.0, done) == wanted
