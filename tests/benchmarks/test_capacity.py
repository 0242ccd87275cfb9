"""The capacity of fleets: the documentation's tables, and how they follow from assumptions."""

from __future__ import annotations

import pytest

from cacheblend_rag.errors import ConfigError
from tests.benchmarks.capacity import CapacityPlan, as_markdown, compute_capacity
from tests.readme import DOCS


def test_the_documentation_has_the_commands_tables(bench) -> None:
    said = bench("capacity").stdout.strip()
    assert said == as_markdown(compute_capacity(CapacityPlan()))
    assert said in (DOCS / "fleet.md").read_text()


def test_bytes_are_those_of_the_page_on_precision() -> None:
    """65,540 bytes per token and chunks of 512, in fp8; a head of at most 2 KiB comes with them."""
    told = compute_capacity(CapacityPlan())
    assert 0 <= told["chunk_bytes"] - 512 * 65_540 < 8192
    native = compute_capacity(CapacityPlan(precision="native"))
    assert native["chunk_bytes"] == pytest.approx(2 * told["chunk_bytes"], rel=0.01)


def test_more_of_anything_needs_more() -> None:
    rows = compute_capacity(CapacityPlan())["rows"]
    assert [row["replicas"] for row in rows] == [1, 10, 100, 1000]
    assert rows[3]["redis_gib_per_second"] == pytest.approx(10 * rows[2]["redis_gib_per_second"])
    cold = compute_capacity(CapacityPlan(memory_share=0.0, redis_share=0.5))["rows"]
    assert cold[3]["s3_connections"] > rows[3]["s3_connections"]
    (big,) = {row["redis_servers"] for row in compute_capacity(CapacityPlan(requests=0))["rows"]}
    assert big == rows[0]["redis_servers"], "what Redis holds does not depend on the fleet"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "int4"}, "precision=int4 must be one of"),
        ({"memory_share": 0.8}, "at most 1 together"),
        ({"chunks": 0}, "chunks=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        CapacityPlan(**options)
