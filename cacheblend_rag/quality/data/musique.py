"""Reads MuSiQue (arXiv 2108.00573).

Each line of the file is ``{"question": str, "answer": str, "answer_aliases": [str, ...],
"answerable": bool, "paragraphs": [{"title": str, "paragraph_text": str, "is_supporting": bool},
...]}``. A paragraph is a document; the supporting ones are gold.
"""

from __future__ import annotations

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data.fields import Field, titled
from cacheblend_rag.quality.data.reading import (
    UNANSWERABLE,
    Form,
    ReadOptions,
    answered_or_not,
    items_have,
    over_passages,
)
from cacheblend_rag.quality.dataset import DEFAULT_KIND, EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document


def read(field: Field, name: str, options: ReadOptions) -> EvalDataset:
    """Return a question per line, over all its paragraphs.

    Raises DatasetError, also if no question is left without the unanswerable ones.
    """
    questions = [
        _question(index, item)
        for index, item in enumerate(field.items())
        if options.unanswerable or item.field("answerable", True).flag()
    ]
    if not questions:
        raise DatasetError(f"{field.where} has no answerable question")
    return answered_or_not(name, questions)


def _question(index: int, field: Field) -> EvalQuestion:
    paragraphs = list(field.each("paragraphs"))
    documents = [
        Document(f"{index}-{place}", (_text(item),)) for place, item in enumerate(paragraphs)
    ]
    answered = field.field("answerable", True).flag()
    supporting = [p for p, item in enumerate(paragraphs) if _is_supporting(item)]
    return over_passages(
        field.field("question").text().strip(),
        _answers(field) if answered else (UNANSWERABLE,),
        documents,
        gold=supporting if answered else (),
        kind=DEFAULT_KIND if answered else UNANSWERABLE,
    )


def _answers(field: Field) -> tuple[str, ...]:
    aliases = field.field("answer_aliases", []).texts(minimum=0)
    return tuple(dict.fromkeys((field.field("answer").text(), *aliases)))


def _is_supporting(field: Field) -> bool:
    return field.field("is_supporting", False).flag()


def _text(field: Field) -> str:
    title = field.field("title", "").text(empty=True)
    return titled(title, field.field("paragraph_text").text())


FORM = Form("MuSiQue", items_have("paragraphs"), read)
