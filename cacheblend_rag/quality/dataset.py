"""Questions with gold answers and retrieved passages, and the two file formats they come in.

**Passages** (the format of ``musique_100.json``): a list of
``{"question": str, "answers": [str, ...], "ctxs": [{"title": str, "text": str}, ...]}``. Every
passage is a document of its own; a title that is not empty stands on a line above its text.

**Documents** (`EvalDataset.save` writes it)::

    {"format": "cacheblend-rag/eval", "version": 1, "name": str, "instruction": str,
     "questions": [{"question": str, "answers": [str, ...], "setting": str, "kind": str,
                    "documents": [{"id": str, "separator": str, "chunks": [str, ...]}, ...],
                    "passages": [[document, chunk], ...]}, ...]}

where ``passages`` names the retrieved chunks by index, in prompt order. The whole documents beside
the retrieved chunks allow the lead-in ``document``. ``setting`` and ``kind`` are labels
that results are grouped by; ``name``, ``instruction``, ``setting``, ``kind`` and ``separator`` are
optional.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.prompt import BlendPrompt

FORMAT = "cacheblend-rag/eval"
VERSION = 1
DEFAULT_INSTRUCTION = "Read the notes below and answer the question. Give a short answer."
DEFAULT_SETTING = "retrieved"
DEFAULT_KIND = "question"
PASSAGE_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class EvalQuestion:
    """One question over retrieved passages.

    answers: gold answers, at least one. passages: the retrieved chunks in prompt order.
    documents: the documents to index; every passage is a chunk of one. setting, kind: labels.
    """

    question: str
    answers: tuple[str, ...]
    passages: tuple[Chunk, ...]
    documents: tuple[Document, ...]
    setting: str = DEFAULT_SETTING
    kind: str = DEFAULT_KIND

    def prompt(self, instruction: str) -> BlendPrompt:
        """Return instruction, passages and question as explicit segments."""
        parts: list[str | Chunk] = [lead_text(instruction)]
        for index, passage in enumerate(self.passages):
            parts += [PASSAGE_SEPARATOR, passage] if index else [passage]
        parts.append(f"{PASSAGE_SEPARATOR}Question: {self.question}\nAnswer:")
        return BlendPrompt.of(*(part for part in parts if part != ""))

    def first_passages(self, count: int) -> EvalQuestion:
        """Return the question over its first ``count`` passages only."""
        return replace(self, passages=self.passages[:count])


@dataclass(frozen=True)
class EvalDataset:
    """Questions under one instruction; ``name`` identifies the dataset in results."""

    name: str
    questions: tuple[EvalQuestion, ...]
    instruction: str = DEFAULT_INSTRUCTION

    @property
    def settings(self) -> tuple[str, ...]:
        """The questions' settings, in order of appearance."""
        return tuple(dict.fromkeys(question.setting for question in self.questions))

    def of_setting(self, setting: str) -> tuple[EvalQuestion, ...]:
        """Return the questions of one setting, in order."""
        return tuple(q for q in self.questions if q.setting == setting)

    def save(self, path: Path) -> None:
        """Write the documents format (see the module's docstring)."""
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "instruction": self.instruction,
            "questions": [_question_to_json(question) for question in self.questions],
        }
        path.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def lead_text(instruction: str) -> str:
    """Return the text before the first passage: the instruction and a blank line, or nothing.

    The engine's ``instruction`` must be this text, so that its lead-in is the prompt's beginning.
    """
    return f"{instruction}{PASSAGE_SEPARATOR}" if instruction else ""


def load_dataset(path: Path) -> EvalDataset:
    """Read a file in either format.

    Raises DatasetError, naming file and field, when it cannot be read or is malformed.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as JSON ({error})") from error
    reader = _Reader(plain, str(path))
    return _read_passages(reader, path.stem) if isinstance(plain, list) else _read_own(reader, path)


@dataclass(frozen=True)
class _Reader:
    """A JSON value with its path, for errors that name the field."""

    value: Any
    where: str

    def fail(self, wanted: str) -> DatasetError:
        return DatasetError(f"{self.where} must be {wanted}")

    def field(self, name: str, default: Any = None) -> _Reader:
        if not isinstance(self.value, Mapping):
            raise self.fail("an object")
        if name not in self.value and default is None:
            raise DatasetError(f"{self.where}: {name} is missing")
        return _Reader(self.value.get(name, default), f"{self.where}: {name}")

    def items(self, *, minimum: int = 1) -> list[_Reader]:
        if not isinstance(self.value, list) or len(self.value) < minimum:
            raise self.fail(f"a list of at least {minimum}")
        return [_Reader(item, f"{self.where}[{i}]") for i, item in enumerate(self.value)]

    def text(self, *, empty: bool = False) -> str:
        if not isinstance(self.value, str) or not (empty or self.value):
            raise self.fail("a string" if empty else "a non-empty string")
        return self.value

    def index(self, length: int) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.fail("an integer")
        if not 0 <= self.value < length:
            raise self.fail(f"an index from 0 to {length - 1}")
        return self.value


def _read_passages(reader: _Reader, name: str) -> EvalDataset:
    questions = [_read_passage_question(i, item) for i, item in enumerate(reader.items())]
    return EvalDataset(name, tuple(questions))


def _read_passage_question(index: int, reader: _Reader) -> EvalQuestion:
    documents = tuple(
        Document(f"{index}-{place}", (_passage_text(item),))
        for place, item in enumerate(reader.field("ctxs").items())
    )
    passages = tuple(document.to_chunks()[0] for document in documents)
    return EvalQuestion(reader.field("question").text(), _answers(reader), passages, documents)


def _passage_text(reader: _Reader) -> str:
    title, text = reader.field("title", "").text(empty=True), reader.field("text").text()
    return f"{title}\n{text}" if title else text


def _answers(reader: _Reader) -> tuple[str, ...]:
    return tuple(item.text() for item in reader.field("answers").items())


def _read_own(reader: _Reader, path: Path) -> EvalDataset:
    if reader.field("format").value != FORMAT or reader.field("version").value != VERSION:
        raise DatasetError(f"{path}: format and version must be {FORMAT!r} and {VERSION}")
    return EvalDataset(
        reader.field("name", path.stem).text(),
        tuple(_read_own_question(item) for item in reader.field("questions").items()),
        reader.field("instruction", DEFAULT_INSTRUCTION).text(empty=True),
    )


def _read_own_question(reader: _Reader) -> EvalQuestion:
    documents = tuple(_read_document(item) for item in reader.field("documents").items())
    if len({document.document_id for document in documents}) < len(documents):
        raise reader.field("documents").fail("documents with different ids")
    return EvalQuestion(
        reader.field("question").text(),
        _answers(reader),
        tuple(_read_passage(item, documents) for item in reader.field("passages").items()),
        documents,
        reader.field("setting", DEFAULT_SETTING).text(),
        reader.field("kind", DEFAULT_KIND).text(),
    )


def _read_document(reader: _Reader) -> Document:
    chunks = tuple(item.text() for item in reader.field("chunks").items())
    separator = reader.field("separator", PASSAGE_SEPARATOR).text(empty=True)
    return Document(reader.field("id").text(), chunks, separator)


def _read_passage(reader: _Reader, documents: Sequence[Document]) -> Chunk:
    pair = reader.items(minimum=2)
    if len(pair) != 2:
        raise reader.fail("a [document, chunk] pair")
    document = documents[pair[0].index(len(documents))]
    return document.to_chunks()[pair[1].index(len(document.chunks))]


def _question_to_json(question: EvalQuestion) -> dict[str, Any]:
    places = {
        chunk: [d, c]
        for d, document in enumerate(question.documents)
        for c, chunk in enumerate(document.to_chunks())
    }
    return {
        "question": question.question,
        "answers": list(question.answers),
        "setting": question.setting,
        "kind": question.kind,
        "documents": [
            {"id": d.document_id, "separator": d.separator, "chunks": list(d.chunks)}
            for d in question.documents
        ],
        "passages": [places[passage] for passage in question.passages],
    }
