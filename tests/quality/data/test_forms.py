from __future__ import annotations

import copy
import json

import pytest

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data import load_dataset

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


@pytest.mark.parametrize("text", [lines(MUSIQUE), json.dumps(MUSIQUE)])
def test_musique_is_read_as_lines_or_as_a_list(write, text):
    (question,) = load_dataset(write(text)).questions
    assert question.answers == ("Bath", "Bath, England")
    assert [chunk.text for chunk in question.gold] == [
        "Acme\nAda founded it.",
        "Ada\nBorn in Bath.",
    ]
    assert len(question.passages) == 3


def test_musique_of_one_line_and_without_answers(write):
    assert len(load_dataset(write(lines(MUSIQUE[:1]))).questions) == 1
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


@pytest.mark.parametrize(
    ("plain", "message"),
    [
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
