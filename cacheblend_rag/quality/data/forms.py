"""Reads questions in three forms: this project's own, a list with passages, and MuSiQue's.

- this project's, which ``quality.dataset`` describes;
- passages: a list of ``{"question": str, "answers": [str, ...], "ctxs": [{"title": str, "text":
  str}, ...]}``;
- MuSiQue (arXiv 2108.00573): ``{"question": str, "answer": str, "answer_aliases": [str, ...],
  "answerable": bool, "paragraphs": [{"title": str, "paragraph_text": str, "is_supporting": bool},
  ...]}``, whose supporting paragraphs are gold; what has no answer is left out.

In the last two every passage is a document of its own; a title that is not empty stands on a line
above its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data.fields import Field
from cacheblend_rag.quality.dataset import (
    DEFAULT_INSTRUCTION,
    DEFAULT_KIND,
    DEFAULT_SETTING,
    FORMAT,
    PASSAGE_SEPARATOR,
    VERSION,
    EvalDataset,
    EvalQuestion,
)
from cacheblend_rag.text.chunk import Chunk, Document


@dataclass(frozen=True)
class Form:
    """A form of files with questions.

    title: for errors. recognise: whether a file's value, read from JSON, has this form.
    read: makes a data set of the value and the file's name without its ending; raises DatasetError
    when a field is missing or malformed.
    """

    title: str
    recognise: Callable[[Any], bool]
    read: Callable[[Field, str], EvalDataset]


def over_passages(
    question: str, answers: tuple[str, ...], documents: Sequence[Document], gold: Sequence[int] = ()
) -> EvalQuestion:
    """Return a question over documents of one chunk each, all retrieved; gold: by index."""
    passages = tuple(document.to_chunks()[0] for document in documents)
    return EvalQuestion(
        question,
        answers,
        passages,
        tuple(documents),
        gold=tuple(passages[place] for place in gold),
    )


def _names_its_format(value: Any) -> bool:
    return isinstance(value, dict) and "format" in value


def _items_have(name: str) -> Callable[[Any], bool]:
    def first_has(value: Any) -> bool:
        return (
            isinstance(value, list)
            and bool(value)
            and isinstance(value[0], dict)
            and name in value[0]
        )

    return first_has


def _read_documents(field: Field, name: str) -> EvalDataset:
    if field.field("format").value != FORMAT or field.field("version").value != VERSION:
        raise DatasetError(f"{field.where}: format and version must be {FORMAT!r} and {VERSION}")
    return EvalDataset(
        field.field("name", name).text(),
        tuple(_saved_question(item) for item in field.each("questions")),
        field.field("instruction", DEFAULT_INSTRUCTION).text(empty=True),
    )


def _saved_question(field: Field) -> EvalQuestion:
    documents = tuple(_document(item) for item in field.each("documents"))
    if len({document.document_id for document in documents}) < len(documents):
        raise field.field("documents").fail("documents with different ids")
    return EvalQuestion(
        field.field("question").text(),
        field.field("answers").texts(),
        tuple(_passage(item, documents) for item in field.each("passages")),
        documents,
        field.field("setting", DEFAULT_SETTING).text(),
        field.field("kind", DEFAULT_KIND).text(),
        tuple(_passage(item, documents) for item in field.field("gold", []).items(minimum=0)),
    )


def _document(field: Field) -> Document:
    separator = field.field("separator", PASSAGE_SEPARATOR).text(empty=True)
    return Document(field.field("id").text(), field.field("chunks").texts(), separator)


def _passage(field: Field, documents: Sequence[Document]) -> Chunk:
    document, chunk = field.pair("a [document, chunk] pair")
    named = documents[document.index(len(documents))]
    return named.to_chunks()[chunk.index(len(named.chunks))]


def _read_passages(field: Field, name: str) -> EvalDataset:
    questions = (
        over_passages(
            item.field("question").text(),
            item.field("answers").texts(),
            _titled(index, item.each("ctxs"), "text"),
        )
        for index, item in enumerate(field.items())
    )
    return EvalDataset(name, tuple(questions))


def _read_musique(field: Field, name: str) -> EvalDataset:
    questions = tuple(
        _musique_question(index, item)
        for index, item in enumerate(field.items())
        if item.field("answerable", True).flag()
    )
    if not questions:
        raise DatasetError(f"{field.where} has no answerable question")
    return EvalDataset(name, questions)


def _musique_question(index: int, field: Field) -> EvalQuestion:
    paragraphs = field.each("paragraphs")
    aliases = field.field("answer_aliases", []).texts(minimum=0)
    return over_passages(
        field.field("question").text().strip(),
        tuple(dict.fromkeys((field.field("answer").text(), *aliases))),
        _titled(index, paragraphs, "paragraph_text"),
        gold=[
            place
            for place, item in enumerate(paragraphs)
            if item.field("is_supporting", False).flag()
        ],
    )


def _titled(index: int, passages: Sequence[Field], name: str) -> list[Document]:
    """Return passages as documents; name: of the field with the text."""
    documents = []
    for place, item in enumerate(passages):
        title, text = item.field("title", "").text(empty=True), item.field(name).text()
        documents.append(Document(f"{index}-{place}", (f"{title}\n{text}" if title else text,)))
    return documents


FORMS = (
    Form("this project's format", _names_its_format, _read_documents),
    Form("a list of questions with ctxs", _items_have("ctxs"), _read_passages),
    Form("MuSiQue", _items_have("paragraphs"), _read_musique),
)
