"""Reads HotpotQA (arXiv 1809.09600), and 2WikiMultihopQA, which has the same form.

The file is a list of ``{"question": str, "answer": str, "type": str, "context": [[title, [sentence,
...]], ...], "supporting_facts": [[title, sentence], ...]}``. A paragraph is a document; those with
a supporting sentence are the gold ones. ``type`` becomes the kind.
"""

from __future__ import annotations

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data.fields import Field, titled
from cacheblend_rag.quality.data.reading import Form, ReadOptions, items_have, over_passages
from cacheblend_rag.quality.dataset import DEFAULT_KIND, EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document


def read(field: Field, name: str, options: ReadOptions) -> EvalDataset:
    """Return a question per item, over all its paragraphs; raises DatasetError."""
    return EvalDataset(name, tuple(_question(i, item) for i, item in enumerate(field.items())))


def _question(index: int, field: Field) -> EvalQuestion:
    paragraphs = [_paragraph(item) for item in field.each("context")]
    titles = [title for title, _ in paragraphs]
    documents = [
        Document(f"{index}-{place}", (titled(title, text),))
        for place, (title, text) in enumerate(paragraphs)
    ]
    return over_passages(
        field.field("question").text().strip(),
        (field.field("answer").text(),),
        documents,
        gold=sorted({_supporting(fact, titles) for fact in field.each("supporting_facts")}),
        kind=field.field("type", DEFAULT_KIND).text(),
    )


def _paragraph(field: Field) -> tuple[str, str]:
    title, sentences = field.pair("a [title, sentences] pair")
    told = [item.text(empty=True).strip() for item in sentences.items()]
    text = " ".join(sentence for sentence in told if sentence)
    if not text:
        raise sentences.fail("sentences that are not all empty")
    return title.text(), text


def _supporting(fact: Field, titles: list[str]) -> int:
    title, _ = fact.pair("a [title, sentence] pair")
    if title.text() not in titles:
        raise DatasetError(f"{title.where} {title.value!r} must be the title of a paragraph")
    return titles.index(title.text())


FORM = Form("HotpotQA", items_have("context"), read)
