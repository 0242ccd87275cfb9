"""Reads the project's own format, which ``quality.dataset`` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data.fields import Field
from cacheblend_rag.quality.data.reading import Form, ReadOptions
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


def recognise(value: Any) -> bool:
    """Tell whether a file's value is an object that names its format."""
    return isinstance(value, dict) and "format" in value


def read(field: Field, name: str, options: ReadOptions) -> EvalDataset:
    """Return the data set that was saved; raises DatasetError."""
    if field.field("format").value != FORMAT or field.field("version").value != VERSION:
        raise DatasetError(f"{field.where}: format and version must be {FORMAT!r} and {VERSION}")
    return EvalDataset(
        field.field("name", name).text(),
        tuple(_question(item) for item in field.each("questions")),
        field.field("instruction", DEFAULT_INSTRUCTION).text(empty=True),
    )


def _question(field: Field) -> EvalQuestion:
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


FORM = Form("this project's format", recognise, read)
