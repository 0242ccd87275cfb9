from __future__ import annotations

import copy
import json

import pytest

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.data.reading import ReadOptions

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Ada_Lovelace",
            "paragraphs": [
                {
                    "context": "Ada was born in 1815.",
                    "qas": [
                        {
                            "id": "1",
                            "question": " When was Ada born?",
                            "answers": [{"text": "1815"}, {"text": "in 1815"}, {"text": "1815"}],
                            "is_impossible": False,
                        },
                        {
                            "id": "2",
                            "question": "When was Bo born?",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                },
                {
                    "context": "She wrote notes.",
                    "qas": [{"question": "What did she write?", "answers": [{"text": "notes"}]}],
                },
                {"context": "She died in 1852.", "qas": []},
            ],
        },
        {
            "title": "Bath",
            "paragraphs": [
                {
                    "context": "Bath has springs.",
                    "qas": [{"question": "What has Bath?", "answers": [{"text": "springs"}]}],
                }
            ],
        },
    ],
}
HOTPOT = [
    {
        "_id": "a",
        "question": "Are Ada and Bo both poets?",
        "answer": "no",
        "type": "comparison",
        "context": [
            ["Cy", ["Cy paints."]],
            ["Ada", ["Ada counts.", " She writes.", ""]],
            ["Bo", ["Bo is a poet."]],
        ],
        "supporting_facts": [["Bo", 0], ["Ada", 0], ["Ada", 1]],
    }
]
MUSIQUE = [
    {
        "id": "2hop",
        "question": "Where was the founder of Acme born?",
        "answer": "Bath",
        "answer_aliases": ["Bath, England", "Bath"],
        "answerable": True,
        "paragraphs": [
            {"idx": 0, "title": "Acme", "paragraph_text": "Ada founded it.", "is_supporting": True},
            {"idx": 1, "title": "Cy", "paragraph_text": "Cy paints.", "is_supporting": False},
            {"idx": 2, "title": "Ada", "paragraph_text": "Born in Bath.", "is_supporting": True},
        ],
    },
    {
        "id": "none",
        "question": "Where was the founder of Zenith born?",
        "answer": "Ulm",
        "answer_aliases": [],
        "answerable": False,
        "paragraphs": [{"title": "Cy", "paragraph_text": "Cy paints.", "is_supporting": False}],
    },
]


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "data.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        return path

    return write_text


def lines(items):
    return "".join(f"{json.dumps(item)}\n" for item in items)


def test_squad_asks_over_the_gold_paragraph_and_others_of_its_article(write):
    data = load_dataset(write(SQUAD))
    by_question = {question.question: question for question in data.questions}
    assert set(by_question) == {"When was Ada born?", "What did she write?", "What has Bath?"}
    ada = by_question["When was Ada born?"]
    assert ada.answers == ("1815", "in 1815")
    assert [chunk.text for chunk in ada.gold] == ["Ada Lovelace\nAda was born in 1815."]
    assert {p.text.split("\n")[1] for p in ada.passages} == {
        "Ada was born in 1815.",
        "She wrote notes.",
        "She died in 1852.",
    }
    assert ada.documents == tuple(
        d for p in ada.passages for d in ada.documents if d.chunks[0] == p.text
    )
    assert len(by_question["What has Bath?"].passages) == 1


@pytest.mark.parametrize("distractors", [0, 1])
def test_squad_draws_so_many_distractors_by_the_seed(write, distractors):
    path = write(SQUAD)

    def drawn(seed):
        options = ReadOptions(seed=seed, distractors=distractors)
        return load_dataset(path, options).questions

    for question in drawn(1):
        assert set(question.gold) <= set(question.passages)
        assert len(question.passages) <= 1 + distractors
    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(8)}) > 1


def test_unanswerable_questions_are_left_out_or_have_a_kind_and_an_instruction(write):
    path = write(SQUAD)
    assert {q.kind for q in load_dataset(path).questions} == {"question"}
    assert "unanswerable" not in load_dataset(path).instruction
    data = load_dataset(path, ReadOptions(unanswerable=True))
    (bo,) = (question for question in data.questions if question.kind == "unanswerable")
    assert (bo.question, bo.answers, bo.gold) == ("When was Bo born?", ("unanswerable",), ())
    assert '"unanswerable"' in data.instruction


def test_hotpotqa_has_several_gold_paragraphs(write):
    (question,) = load_dataset(write(HOTPOT)).questions
    assert (question.answers, question.kind) == (("no",), "comparison")
    assert [p.text for p in question.passages] == [
        "Cy\nCy paints.",
        "Ada\nAda counts. She writes.",
        "Bo\nBo is a poet.",
    ]
    assert question.gold == question.passages[1:]


@pytest.mark.parametrize("text", [lines(MUSIQUE), json.dumps(MUSIQUE)])
def test_musique_is_read_as_lines_or_as_a_list(write, text):
    (question,) = load_dataset(write(text)).questions
    assert question.answers == ("Bath", "Bath, England")
    assert [chunk.text for chunk in question.gold] == [
        "Acme\nAda founded it.",
        "Ada\nBorn in Bath.",
    ]
    assert len(question.passages) == 3


def test_musique_of_one_line_and_its_unanswerable_questions(write):
    assert len(load_dataset(write(lines(MUSIQUE[:1]))).questions) == 1
    data = load_dataset(write(lines(MUSIQUE)), ReadOptions(unanswerable=True))
    assert [q.kind for q in data.questions] == ["question", "unanswerable"]
    assert data.questions[1].answers == ("unanswerable",)
    with pytest.raises(DatasetError, match="no answerable question"):
        load_dataset(write(lines(MUSIQUE[1:])))


def changed(plain, *keys, value=None):
    """Return the data with the value under these keys replaced, or deleted if it is None."""
    copied = copy.deepcopy(plain)
    target = copied
    for key in keys[:-1]:
        target = target[key]
    if value is None:
        del target[keys[-1]]
    else:
        target[keys[-1]] = value
    return copied


PARAGRAPH = ("data", 0, "paragraphs", 0)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (changed(SQUAD, "data", value=[]), "data must be a list of at least 1"),
        (changed(SQUAD, "data", 0, value=3), r"data\[0\] must be an object"),
        (changed(SQUAD, "data", 0, "paragraphs"), r"data\[0\]: paragraphs is missing"),
        (changed(SQUAD, *PARAGRAPH, "context"), r"paragraphs\[0\]: context is missing"),
        (changed(SQUAD, *PARAGRAPH, "qas"), r"paragraphs\[0\]: qas is missing"),
        (changed(SQUAD, *PARAGRAPH, "qas", 0, "answers", value=[]), r"qas\[0\]: answers must be"),
        (
            changed(SQUAD, *PARAGRAPH, "qas", 0, "answers", 0, value={"text": ""}),
            r"answers\[0\]: text must be a non-empty string",
        ),
        (
            changed(SQUAD, *PARAGRAPH, "qas", 0, "is_impossible", value="no"),
            "is_impossible must be true or false",
        ),
        (changed(HOTPOT, 0, "answer"), r"\[0\]: answer is missing"),
        (
            changed(HOTPOT, 0, "context", 0, value=["Cy"]),
            r"context\[0\] must be a list of at least 2",
        ),
        (
            changed(HOTPOT, 0, "context", 0, value=["Cy", "x", "y"]),
            r"context\[0\] must be a \[title, sentences\] pair",
        ),
        (changed(HOTPOT, 0, "context", 0, 1, value=[" "]), "sentences that are not all empty"),
        (changed(HOTPOT, 0, "supporting_facts"), "supporting_facts is missing"),
        (
            changed(HOTPOT, 0, "supporting_facts", 0, 0, value="Di"),
            r"supporting_facts\[0\]\[0\] 'Di' must be the title of a paragraph",
        ),
        (changed(MUSIQUE, 0, "answer"), r"\[0\]: answer is missing"),
        (changed(MUSIQUE, 0, "answerable", value="yes"), "answerable must be true or false"),
        (changed(MUSIQUE, 0, "paragraphs", value=[]), "paragraphs must be a list of at least 1"),
        (
            changed(MUSIQUE, 0, "paragraphs", 1, "paragraph_text"),
            r"paragraphs\[1\]: paragraph_text is missing",
        ),
        (
            changed(MUSIQUE, 0, "paragraphs", 1, "is_supporting", value=1),
            "is_supporting must be true or false",
        ),
        ([*MUSIQUE[:1], 3], r"\[1\] must be an object"),
    ],
)
def test_errors_name_file_and_field_in_one_line(write, plain, message):
    path = write(plain)
    with pytest.raises(DatasetError, match=message) as caught:
        load_dataset(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_damaged_line_is_named(write):
    path = write(lines(MUSIQUE) + "\n{'question'}\n")
    with pytest.raises(DatasetError, match="line 4 cannot be read as JSON"):
        load_dataset(path)
