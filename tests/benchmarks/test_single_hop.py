from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.metrics import holds_answer
from tests.benchmarks.single_hop import SingleHopPlan, find_candidates
from tests.benchmarks.written_questions import (
    paragraphs_of,
    tidy,
    with_capitals,
    write_questions,
)
from tests.toy import TOY

NAMES = ("Ada", "Bo", "Cy", "Di")
RUNNING_TEXT = (
    "off at the beginning. ada stone ( born 3 may 1951 ) is an american singer. she lives in bath. "
    "the glass door is a 2001 crime film directed by bo lund and starring cy moss. it was a hit. "
    "pine hill is a village in door county, wisconsin. its population was 1, 204 in 2010. "
    "red dust is a 1990 novel by american writer di marsh, set in peru. "
    "ed falk ( june 2, 1901 \u2013 july 9, 1980 ) was a poet. he sang. "
    "wet days is the second album by jazz trumpeter flo gray. this is cut"
)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("When was Ada Stone born?", "3 may 1951"),
        ("Who directed The Glass Door?", "bo lund"),
        ("In which county is Pine Hill?", "door county"),
        ("Who wrote Red Dust?", "di marsh"),
        ("When was Ed Falk born?", "june 2, 1901"),
        ("When did Ed Falk die?", "july 9, 1980"),
        ("Whose album is Wet Days?", "flo gray"),
    ],
)
def test_questions_are_written_from_first_sentences(question, answer):
    paragraphs = paragraphs_of([RUNNING_TEXT, RUNNING_TEXT[30:]])
    written = list(write_questions(paragraphs))
    assert len(written) == 7
    (found,) = (one for one in written if one.question == question)
    assert found.answer == answer
    assert answer in found.paragraph


def test_running_text_is_cut_before_sentences_that_introduce_a_subject():
    paragraphs = paragraphs_of([RUNNING_TEXT, RUNNING_TEXT[: RUNNING_TEXT.index("it was a h")]])
    assert paragraphs[:2] == [
        "ada stone (born 3 may 1951) is an american singer. she lives in bath.",
        "the glass door is a 2001 crime film directed by bo lund and starring cy moss. "
        "it was a hit.",
    ]
    assert len(paragraphs) == 6


def test_punctuation_and_capitals_are_put_right():
    assert tidy('a " b " ( ; c ) x - y, 1, 204 on june 2, 1901 ; z') == (
        'a "b" (c) x-y, 1,204 on june 2, 1901; z'
    )
    told = "ada de stone is an american singer. she left ada de stone in may 1951 with bo lund."
    assert with_capitals(told, ["bo lund"]) == (
        "Ada de Stone is an American singer. She left Ada de Stone in May 1951 with Bo Lund."
    )
    assert with_capitals("Ada is an american.") == "Ada is an american."


def passages_file(path: Path, texts) -> str:
    ctxs = [{"title": "", "text": text} for text in texts]
    path.write_text(json.dumps([{"question": "Which?", "answers": ["it"], "ctxs": ctxs}]))
    return str(path)


def test_a_written_question_is_answered_by_one_passage_only(tmp_path):
    other = "the end. ada stone is a town. it has bo lund. ed moss is a cook. he is old. this"
    path = passages_file(tmp_path / "p.json", [RUNNING_TEXT, other])
    found = find_candidates(SingleHopPlan(data=path, passages=4))
    assert {question.question for question in found} == {
        "In which county is Pine Hill?",
        "Who wrote Red Dust?",
        "When was Ed Falk born?",
        "When did Ed Falk die?",
        "Whose album is Wet Days?",
        "Who directed The Glass Door?",
        "When was Ada Stone born?",
    }
    for question in found:
        assert len(question.passages) == 4
        holding = [p for p in question.passages if holds_answer(p.text, question.answers)]
        assert holding == list(question.gold)
    assert not find_candidates(SingleHopPlan(data=path, passages=9))


def squad_file(path: Path) -> str:
    paragraphs = [
        {
            "context": f"{name} lives in town {place}.",
            "qas": [{"question": f"Where is {name}?", "answers": [{"text": f"town {place}"}]}],
        }
        for place, name in enumerate(NAMES)
    ]
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    return str(path)


def test_questions_with_one_gold_passage_are_used_themselves(tmp_path):
    found = find_candidates(SingleHopPlan(data=squad_file(tmp_path / "s.json"), passages=3))
    assert {question.question for question in found} == {f"Where is {name}?" for name in NAMES}
    for question in found:
        assert len(question.passages) == len(question.documents) == 3
        assert question.gold[0] in question.passages


def test_what_the_model_answers_from_passages_only_is_kept(tmp_path, bench):
    path, out = squad_file(tmp_path / "s.json"), tmp_path / "kept.json"
    given = ("single_hop", "--data", path, "--model", TOY, "--passages", 3, "--candidates", 3)
    strict = bench(*given, "--with-f1", 1.1, "--out", out, "--json").json
    assert [(row["questions"], row["count"]) for row in strict["rows"]] == [("all", 3), ("kept", 0)]
    assert set(strict["rows"][0]) == {"questions", "count", "f1_passages", "exact_passages"}
    assert not out.exists()
    lax = ("--with-f1", 0, "--without-f1", 1, "--distractors-f1", 1, "--out", out, "--json")
    tried, kept = bench(*given, *lax).json["rows"]
    assert kept["count"] == tried["count"] == 3
    assert 0 <= kept["f1_none"] <= 1
    assert len(load_dataset(out).questions) == 3
    assert "kept, demo" in bench(*given, "--with-f1", 1.1).stdout


def test_a_file_without_single_hop_questions_is_refused(tmp_path, bench):
    path = passages_file(tmp_path / "p.json", ["nothing here. at all. really."])
    outcome = bench("single_hop", "--data", path, "--model", TOY)
    assert outcome.code == 2
    assert "no single-hop question" in outcome.stderr
    with pytest.raises(DatasetError, match="cannot be read"):
        find_candidates(SingleHopPlan(data=str(tmp_path / "none.json")))
