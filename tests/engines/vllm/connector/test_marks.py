"""Which prompts share the blocks of their chunks: by marks alone, without vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.engines.catalog import Name
from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.connector import prefix
from cacheblend_rag.engines.vllm.connector.prefix import Marks, Stretch
from cacheblend_rag.prefill.lead_in import LeadInId

BARE = LeadInId("none", "", 0)
CONFIG = BlendConfig(selector="question_mid", recompute_ratio=0.2)
WITHOUT_QUESTION = CONFIG.with_changes(selector="hkvd")
OPENING, QUESTION, ANSWER = (1, 1, 1), (9,) * 5, (8,) * 7


def chunk(letter: str, start: int, deletions: int = 0) -> FoundChunk:
    name = Name("n" * 32, letter * 32, "", BARE)
    return FoundChunk(name, start, start + 40, deletions=deletions)


A, B = chunk("a", 3), chunk("b", 43)
FIRST = (*OPENING, *range(100, 180), *QUESTION)
LATER = (*FIRST, *ANSWER, *range(200, 240), 9, 9)
C = chunk("c", len(FIRST) + len(ANSWER))


def of(marks: Marks, tokens: tuple[int, ...], *found: FoundChunk, **more: object) -> list[Stretch]:
    config = more.pop("config", CONFIG)
    return [*marks.stretches("r", tokens, found, config, **more)]


def test_a_prompt_that_goes_on_has_the_earlier_ones_marks() -> None:
    marks = Marks()
    [first] = of(marks, FIRST, A, B)
    assert (first.first, first.start, first.is_own) == (0, 3, True)
    assert of(marks, FIRST, A, B) == [first], "a repeat is the same work"
    kept, new = of(marks, LATER, A, B, C)
    assert (kept.mark, kept.is_own) == (first.mark, False)
    assert (new.first, new.start, new.is_own) == (2, C.start, True)
    assert of(marks, LATER, A, B, C) == [kept, new]
    [answered] = of(marks, (*FIRST, *ANSWER), A, B)
    assert (answered.mark, answered.is_own) == (first.mark, False), "there is nothing new"


def test_another_question_has_another_mark_if_rows_depend_on_it() -> None:
    marks, other = Marks(), (*FIRST[:-1], 5)
    assert of(marks, FIRST, A, B)[0].mark != of(marks, other, A, B)[0].mark
    one, same = (of(marks, tokens, A, B, config=WITHOUT_QUESTION) for tokens in (FIRST, other))
    assert one == same
    assert one[0].is_own


@pytest.mark.parametrize(
    "found",
    [
        (A,),
        (A, replace(B, deletions=1)),
        (A, replace(B, protected=True)),
        (A, replace(B, start=44)),
        (A, replace(B, before=1)),
        (A, replace(B, name=replace(B.name, context_id="c" * 32))),
    ],
)
def test_a_mark_is_of_the_stored_kv_and_its_places(found: tuple[FoundChunk, ...]) -> None:
    marks = Marks()
    [first] = of(marks, FIRST, A, B)
    assert first.mark not in {one.mark for one in of(marks, FIRST, *found)}
    if len(found) == 2:
        assert first.mark not in {one.mark for one in of(marks, LATER, *found, C)}


@pytest.mark.parametrize(
    "change", [{"recompute_ratio": 0.3}, {"trace": True}, {"reuse_prefix": False}]
)
def test_a_mark_is_of_the_settings(change: dict[str, object]) -> None:
    marks, config = Marks(), CONFIG.with_changes(**change)
    [first] = of(marks, FIRST, A, B)
    kept = of(marks, LATER, A, B, C, config=config)
    assert first.mark not in {one.mark for one in kept}
    if "recompute_ratio" not in change:
        one, other = (
            marks.stretches(name, FIRST, (A, B), config)[0].mark for name in ("one", "other")
        )
        assert one != other, "they share nothing"


def test_who_lacks_the_earlier_blocks_begins_anew() -> None:
    """Its blocks are its own from then on; the earlier prompt's stay that prompt's."""
    marks = Marks()
    [first] = of(marks, FIRST, A, B)
    assert len(of(marks, LATER, A, B, C)) == 2
    [whole] = of(marks, LATER, A, B, C, anew=True)
    assert (whole.first, whole.is_own) == (0, True)
    assert of(marks, FIRST, A, B) == [first]
    assert of(marks, LATER, A, B, C) == [whole]
    [further] = of(marks, (*LATER, *ANSWER), A, B, C)
    assert (further.mark, further.is_own) == (whole.mark, False)


def test_what_is_forgotten_is_blended_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "KEPT", 2)
    marks = Marks()
    of(marks, FIRST, A, B)
    for letter in "def":
        of(marks, FIRST, chunk(letter, 3))
    assert [one.is_own for one in of(marks, LATER, A, B, C)] == [True]
    for question in range(20):
        of(marks, (*FIRST[:-1], question), A, B)
    assert len(of(marks, LATER, A, B, C)) == 1
