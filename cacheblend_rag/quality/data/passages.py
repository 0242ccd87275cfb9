"""Reads a list of questions with the passages retrieved for each.

The file is a list of ``{"question": str, "answers": [str, ...], "ctxs": [{"title": str, "text":
str}, ...]}``. Every passage is a document of its own; a title that is not empty stands on a line
above its text.
"""

from __future__ import annotations

from cacheblend_rag.quality.data.fields import Field, titled
from cacheblend_rag.quality.data.reading import Form, ReadOptions, items_have, over_passages
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document


def read(field: Field, name: str, options: ReadOptions) -> EvalDataset:
    """Return a question per item, over all its passages; raises DatasetError."""
    return EvalDataset(name, tuple(_question(i, item) for i, item in enumerate(field.items())))


def _question(index: int, field: Field) -> EvalQuestion:
    documents = [
        Document(f"{index}-{place}", (_text(item),))
        for place, item in enumerate(field.each("ctxs"))
    ]
    return over_passages(field.field("question").text(), field.field("answers").texts(), documents)


def _text(field: Field) -> str:
    return titled(field.field("title", "").text(empty=True), field.field("text").text())


FORM = Form("a list of questions with ctxs", items_have("ctxs"), read)
