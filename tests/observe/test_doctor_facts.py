"""What the doctor finds out: chunks in another form, and who used the CPUs."""

from __future__ import annotations

import time

import pytest
import torch

from cacheblend_rag import Chunk
from cacheblend_rag.observe.machine import CpuLoad, CpuSeconds, available_bytes
from cacheblend_rag.observe.similar import similar_chunks

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
    assert registered in one.registered
    assert found in one.found
    assert one.registered != one.found


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


@pytest.mark.parametrize(
    ("after", "load", "is_busy"),
    [
        (CpuSeconds(own=5, busy=5, idle=5, steal=0), CpuLoad(0.5, 0.0, 0.0, 0.5), False),
        (CpuSeconds(own=10, busy=10, idle=0, steal=0), CpuLoad(1.0, 0.0, 0.0, 0.0), False),
        (CpuSeconds(own=5, busy=10, idle=0, steal=0), CpuLoad(0.5, 0.5, 0.0, 0.0), True),
        (CpuSeconds(own=3, busy=7, idle=3, steal=0), CpuLoad(0.3, 0.4, 0.0, 0.3), False),
        (CpuSeconds(own=8, busy=8, idle=0, steal=2), CpuLoad(0.8, 0.0, 0.2, 0.0), True),
    ],
    ids=["alone", "all CPUs for itself", "shared", "room for all", "stolen"],
)
def test_a_machine_is_busy_when_others_leave_nothing(
    after: CpuSeconds, load: CpuLoad, is_busy: bool
) -> None:
    before = CpuSeconds(0, 0, 0, 0)
    assert CpuLoad.between(before, after) == load
    assert load.is_busy == is_busy
    assert CpuLoad.between(None, after) is CpuLoad.between(after, after) is None


def test_this_machine_counts_what_this_process_uses() -> None:
    before = CpuSeconds.now()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    now = CpuSeconds.now()
    assert before is not None
    assert now is not None
    assert 0.25 < now.own - before.own < 1.0
    assert now.busy - before.busy >= 0.25
    assert available_bytes(torch.device("cpu")) > 1 << 20
