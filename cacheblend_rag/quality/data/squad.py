"""Reads SQuAD 1.1 and 2.0 (arXiv 1606.05250, 1806.03822) as questions over several paragraphs.

The file is ``{"data": [{"title": str, "paragraphs": [{"context": str, "qas": [{"question": str,
"answers": [{"text": str}, ...], "is_impossible": bool}, ...]}, ...]}, ...]}``. A question comes
with its paragraph and others of the same article, drawn with the seed, in random order. The
questions are in random order, too: in the file, neighbours ask about the same paragraph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data.fields import Field, titled
from cacheblend_rag.quality.data.reading import (
    UNANSWERABLE,
    Form,
    ReadOptions,
    answered_or_not,
    over_passages,
)
from cacheblend_rag.quality.dataset import DEFAULT_KIND, EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document


def recognise(value: Any) -> bool:
    """Tell whether a file's value is an object with articles under ``data``."""
    return isinstance(value, dict) and "data" in value


def read(field: Field, name: str, options: ReadOptions) -> EvalDataset:
    """Return the file's questions, each over its paragraph and distractors.

    Raises DatasetError, also if no question is left without the unanswerable ones.
    """
    rng = random.Random(options.seed)
    questions = [
        question
        for number, article in enumerate(field.each("data"))
        for question in _article(number, article, options, rng)
    ]
    if not questions:
        raise DatasetError(f"{field.where}: data has no answerable question")
    rng.shuffle(questions)
    return answered_or_not(name, questions)


def _article(
    number: int, article: Field, options: ReadOptions, rng: random.Random
) -> Iterator[EvalQuestion]:
    title = article.field("title", "").text(empty=True).replace("_", " ")
    paragraphs = list(article.each("paragraphs"))
    documents = [
        Document(f"{number}-{place}", (titled(title, item.field("context").text()),))
        for place, item in enumerate(paragraphs)
    ]
    for place, paragraph in enumerate(paragraphs):
        for asked in paragraph.field("qas").items(minimum=0):
            answers = _answers(asked)
            answered = answers != (UNANSWERABLE,)
            if answered or options.unanswerable:
                drawn = _drawn(place, len(documents), options, rng)
                yield over_passages(
                    asked.field("question").text().strip(),
                    answers,
                    [documents[index] for index in drawn],
                    gold=[drawn.index(place)] if answered else (),
                    kind=DEFAULT_KIND if answered else UNANSWERABLE,
                )


def _answers(asked: Field) -> tuple[str, ...]:
    if asked.field("is_impossible", False).flag():
        return (UNANSWERABLE,)
    answers = (item.field("text").text() for item in asked.each("answers"))
    return tuple(dict.fromkeys(answers))


def _drawn(place: int, count: int, options: ReadOptions, rng: random.Random) -> list[int]:
    """Return a paragraph's index and those of distractors, in random order."""
    others = [index for index in range(count) if index != place]
    drawn = [place, *rng.sample(others, min(options.distractors, len(others)))]
    rng.shuffle(drawn)
    return drawn


FORM = Form("SQuAD", recognise, read)
