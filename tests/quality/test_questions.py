from __future__ import annotations

import json

import pytest

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.cutting import Cutting, estimate_tokens
from cacheblend_rag.quality.questions import choose_questions
from tests.toy.questions import toy_dataset


def paragraph(number: int) -> str:
    facts = (f"Fact {place} of number {number} is dull." for place in range(30))
    return " ".join([*facts, f"The colour is gold{number}x."])


@pytest.fixture
def file(tmp_path):
    """A file of twelve questions over all twelve paragraphs, of which one has the answer."""
    paragraphs = [
        {"title": "Art", "paragraph_text": paragraph(number), "is_supporting": False}
        for number in range(12)
    ]
    asked = [
        {
            "question": f"Colour {number}?",
            "answer": f"gold{number}x",
            "paragraphs": [
                {**one, "is_supporting": place == number} for place, one in enumerate(paragraphs)
            ],
        }
        for number in range(12)
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(asked))
    return str(path)


def test_a_file_is_taken_as_it_is_with_so_many_passages(file):
    data = choose_questions(file, [], 5, 3, 1)
    assert data.settings == ("retrieved",)
    assert [len(question.passages) for question in data.questions] == [3] * 5
    assert all(set(question.gold) <= set(question.passages) for question in data.questions)


def test_a_file_is_cut_in_all_settings_or_those_asked_for(file):
    cutting = Cutting(chunk_tokens=60, prompt_tokens=(900, 1100))
    data = choose_questions(file, [], 4, None, 1, cutting=cutting)
    assert data.settings == ("adjacent", "fragments", "shuffled")
    assert len(data.questions) == 12
    for question in data.of_setting("adjacent"):
        tokens = sum(estimate_tokens(passage.text) for passage in question.passages)
        assert 900 <= tokens <= 1100
    for question in data.of_setting("fragments"):
        assert all(passage.context for passage in question.passages)
    only = choose_questions(file, ["shuffled"], 2, 3, 1, cutting=cutting)
    assert only.settings == ("shuffled",)
    assert [len(question.passages) for question in only.questions] == [3, 3]


def test_tokens_are_counted_as_told(file):
    cutting = Cutting(chunk_tokens=300, prompt_tokens=(4000, 5000), count_tokens=len)
    for question in choose_questions(file, ["adjacent"], 3, None, 1, cutting=cutting).questions:
        assert 4000 <= sum(len(passage.text) for passage in question.passages) <= 5000


def test_a_length_of_the_prompt_alone_cuts_chunks_of_a_hundred_tokens(file):
    cutting = Cutting(prompt_tokens=(900, 1200))
    (question,) = choose_questions(file, ["adjacent"], 1, None, 1, cutting=cutting).questions
    assert all(80 <= estimate_tokens(passage.text) <= 130 for passage in question.passages)


def test_single_hop_questions_come_with_the_package():
    data = choose_questions("single-hop", [], 99, None, 1)
    assert len({question.question for question in data.questions}) == len(data.questions) > 10
    for question in data.questions:
        holding = [p for p in question.passages if question.answers[0] in p.text.lower()]
        assert holding == list(question.gold)
        assert len(question.passages) == 4
    cut = choose_questions(
        "single-hop", ["adjacent"], 5, None, 1, cutting=Cutting(prompt_tokens=(1500, 2000))
    )
    assert len(cut.questions) == 5


@pytest.mark.parametrize(
    ("cutting", "message"),
    [(Cutting(chunk_tokens=50), "setting='upright'"), (None, "'upright' must be one of")],
)
def test_what_a_source_does_not_have_is_refused(cutting, message):
    with pytest.raises((ConfigError, DatasetError), match=message):
        choose_questions("single-hop", ["upright"], 2, None, 1, cutting=cutting)


def test_questions_are_chosen_from_a_file_by_setting_number_and_passages(tmp_path):
    data = toy_dataset([], 3, 1)
    data.save(path := tmp_path / "demo.json")
    chosen = choose_questions(str(path), ["shuffled", "adjacent"], 2, 1, 1)
    wanted = [*data.of_setting("shuffled")[:2], *data.of_setting("adjacent")[:2]]
    assert [q.question for q in chosen.questions] == [q.question for q in wanted]
    assert [q.passages for q in chosen.questions] == [q.passages[:1] for q in wanted]
    assert choose_questions(str(path), [], 3, None, 1) == data
    with pytest.raises(DatasetError, match="'upright'"):
        choose_questions(str(path), ["upright"], 2, None, 1)
