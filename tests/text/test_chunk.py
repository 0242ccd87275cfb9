"""Documents to chunks: what each is told of what precedes it."""

from __future__ import annotations

import pytest

from cacheblend_rag import BOUNDARY_KEY, ConfigError, Document, read_boundary


def contexts(*boundaries: str) -> list[tuple[str, ...]]:
    texts = tuple(f"t{n}" for n in range(len(boundaries)))
    document = Document("d", texts, "|", boundaries=boundaries)
    return [tuple(chunk.context) for chunk in document.to_chunks()]


def test_a_context_ends_where_the_boundary_changes() -> None:
    assert contexts("", "", "") == [(), ("t0", "|"), ("t0", "|", "t1", "|")]
    assert contexts("a", "a", "a") == contexts("", "", "")
    assert contexts("a", "b", "b", "a") == [(), (), ("t1", "|"), ()]
    assert contexts("", "a", "", "") == [(), (), (), ("t2", "|")]


@pytest.mark.parametrize("boundaries", [("a",), ("a", "b", "c")])
def test_a_boundary_for_each_chunk_or_none(boundaries: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"has {len(boundaries)} boundaries for 2 chunks"):
        Document("d", ("x", "y"), boundaries=boundaries)


@pytest.mark.parametrize(
    ("one", "other"),
    [(["hr", "it"], ("it", "hr")), ({"b": 1, "a": 2}, {"a": 2, "b": 1}), (None, "")],
)
def test_a_boundary_is_read_from_any_value(one: object, other: object) -> None:
    assert read_boundary({BOUNDARY_KEY: one}) == read_boundary({BOUNDARY_KEY: other})
