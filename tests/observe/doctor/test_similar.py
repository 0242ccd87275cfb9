"""Chunks in another form are found in texts, and others are not."""

from __future__ import annotations

import pytest

from cacheblend_rag import Chunk
from cacheblend_rag.observe.doctor.similar import similar_chunks

PASSAGE = "Clara Berg moved to Rome in 1972, and she has kept a canary and two cats there since."
CHUNK = Chunk(PASSAGE, "clara")
OTHER = "The company sold drums in Lisbon for many years before it was bought by a rival firm."


@pytest.mark.parametrize(
    ("text", "registered", "found"),
    [
        (
            PASSAGE.replace(" she", "\nshe"),
            "and she has",
            "and\nshe has",
        ),
        (PASSAGE.replace(" ", "  "), "Clara Berg", "Clara  Berg"),
    ],
)
def test_other_white_space_is_told_where_it_begins(text: str, registered: str, found: str) -> None:
    (one,) = similar_chunks([f"Read this.\n\n{text}\n\nWho?"], [CHUNK, Chunk(OTHER)])
    assert (one.document_id, one.differs, one.share) == ("clara", "white space", 1.0)
    assert one.registered in PASSAGE
    assert one.found in text
    assert registered in one.registered
    assert found in one.found


@pytest.mark.parametrize(
    ("change", "share", "registered", "found"),
    [
        (str.lower, 1.0, "Clara Berg", "clara berg"),
        (lambda text: text.replace("Rome", "Oslo"), 0.83, "Rome", "Oslo"),
        (lambda text: text.replace(",", ""), 1.0, "1972,", "1972"),
        (lambda text: text.replace("two cats ", ""), 0.7, "two cats", ""),
    ],
)
def test_other_words_are_told(change, share, registered: str, found: str) -> None:
    (one,) = similar_chunks([f"Read this: {change(PASSAGE)} Who?"], [CHUNK])
    assert one.differs == "text"
    assert one.share == pytest.approx(share, abs=0.1)
    assert (one.registered, one.found) == (registered, found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Who lives in Rome, and since when has she kept a canary?",
        f"Read this:\n\n{OTHER}",
        f"As it was registered: {PASSAGE}",
    ],
)
def test_what_is_not_there_is_not_found(text: str) -> None:
    assert similar_chunks([text], [CHUNK]) == ()


def test_a_few_words_are_not_searched_for() -> None:
    assert similar_chunks([f"{PASSAGE} Yes,  of course."], [Chunk("Yes, of course.")]) == ()
