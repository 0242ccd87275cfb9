"""Chooses the questions of an evaluation from a file, in one of three forms.

A form is recognised by its content:

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

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from cacheblend_rag.demo.passages import SINGLE_HOP, SINGLE_HOP_FILE
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.cutting import (
    CUT_SETTINGS,
    QuestionSettings,
    cut,
    estimate_tokens,
)
from cacheblend_rag.quality.dataset import (
    DEFAULT_INSTRUCTION,
    DEFAULT_SETTING,
    PASSAGE_SEPARATOR,
    EvalDataset,
    EvalQuestion,
)
from cacheblend_rag.text.chunk import Document

ValueT = TypeVar("ValueT")
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Place = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
"""A document and its chunk, by index."""
KNOWN = "this project's format, a list of questions with ctxs, MuSiQue"


def choose_questions(
    source: str,
    questions: int,
    settings: QuestionSettings | None = None,
    load_tokenizer: Callable[[], Any] | None = None,
) -> EvalDataset:
    """Return at most so many questions per setting.

    source: ``single-hop`` (which comes with the package), or a file of questions. load_tokenizer:
    returns what counts the tokens of cut documents; they are estimated without it. Raises
    ConfigError, DatasetError on an unknown setting, and the errors of load_dataset.
    """
    settings = settings or QuestionSettings()
    data = load_dataset(SINGLE_HOP_FILE if source == SINGLE_HOP else Path(source))
    if settings.cuts:
        tokenizer = load_tokenizer() if load_tokenizer else None
        count = (lambda text: len(tokenizer.tokenize(text))) if tokenizer else estimate_tokens
        parts = [
            cut(data, setting, settings, questions, count).questions
            for setting in settings.settings or CUT_SETTINGS
        ]
        data = replace(data, questions=tuple(chain(*parts)))
    for setting in settings.settings:
        if setting not in data.settings:
            raise DatasetError(f"{source}: setting {setting!r} must be one of {data.settings}")
    chosen = (
        data.of_setting(setting)[:questions] for setting in settings.settings or data.settings
    )
    return replace(data, questions=tuple(chain(*chosen)))


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Document(_Form):
    id: Text
    chunks: Texts
    separator: str = PASSAGE_SEPARATOR


class _Question(_Form):
    question: Text
    answers: Texts
    documents: Annotated[list[_Document], Field(min_length=1)]
    passages: Annotated[list[Place], Field(min_length=1)]
    gold: list[Place] = []
    setting: Text = DEFAULT_SETTING

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len({document.id for document in self.documents}) < len(self.documents):
            raise ValueError("documents must have different ids")
        for document, chunk in (*self.passages, *self.gold):
            found = self.documents[document : document + 1]
            if not found or chunk >= len(found[0].chunks):
                raise ValueError(f"there is no chunk [{document}, {chunk}]")
        return self

    def read(self) -> EvalQuestion:
        documents = tuple(Document(d.id, tuple(d.chunks), d.separator) for d in self.documents)
        chunks = [document.to_chunks() for document in documents]
        passages, gold = (
            tuple(chunks[document][chunk] for document, chunk in places)
            for places in (self.passages, self.gold)
        )
        answers = tuple(self.answers)
        return EvalQuestion(self.question, answers, passages, documents, self.setting, gold)


class _Questions(_Form):
    format: Literal["cacheblend-rag/eval"]
    version: Literal[1]
    name: Text | None = None
    instruction: str = DEFAULT_INSTRUCTION
    questions: Annotated[list[_Question], Field(min_length=1)]


class _Passage(_Form):
    title: str = ""
    text: Text


class _WithPassages(_Form):
    question: Text
    answers: Texts
    ctxs: Annotated[list[_Passage], Field(min_length=1)]


class _Paragraph(_Passage):
    text: Text = Field(validation_alias="paragraph_text")
    is_supporting: bool = False


class _OfMusique(_Form):
    question: Text
    answer: Text
    answer_aliases: list[Text] = []
    answerable: bool = True
    paragraphs: Annotated[list[_Paragraph], Field(min_length=1)]


def load_dataset(path: Path) -> EvalDataset:
    """Read a file in any of the forms, as JSON or as JSON lines.

    Raises DatasetError, naming file and field, when it cannot be read, has no known form or is
    malformed.
    """
    value = _parse(path)
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(value, dict) and "format" in value:
        saved = _read(path, _Questions, value)
        questions = tuple(one.read() for one in saved.questions)
        return EvalDataset(saved.name or path.stem, questions, saved.instruction)
    if isinstance(first, dict) and "ctxs" in first:
        asked = [
            over_passages(one.question, tuple(one.answers), _documents(at, one.ctxs))
            for at, one in enumerate(_read(path, list[_WithPassages], value))
        ]
    elif isinstance(first, dict) and "paragraphs" in first:
        asked = [
            over_passages(
                one.question.strip(),
                tuple(dict.fromkeys([one.answer, *one.answer_aliases])),
                _documents(at, one.paragraphs),
                [place for place, text in enumerate(one.paragraphs) if text.is_supporting],
            )
            for at, one in enumerate(_read(path, list[_OfMusique], value))
            if one.answerable
        ]
        if not asked:
            raise DatasetError(f"{path} has no answerable question")
    else:
        raise DatasetError(f"{path}: the form is not recognised; it must be one of: {KNOWN}")
    return EvalDataset(path.stem, tuple(asked))


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


def _parse(path: Path) -> Any:
    """Return a file's JSON value; JSON lines, of which there may be only one, make a list."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as JSON ({error})") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise DatasetError(f"{path}: cannot be read as JSON ({error})") from error
        return [_parse_line(path, i, line) for i, line in enumerate(text.split("\n")) if line]
    return [value] if isinstance(value, dict) and "question" in value else value


def _parse_line(path: Path, index: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: line {index + 1} cannot be read as JSON ({error})") from error


def _read(path: Path, form: type[ValueT], value: Any) -> ValueT:
    try:
        return TypeAdapter(form).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{at}]" if isinstance(at, int) else f": {at}" for at in first["loc"])
        told = " ".join(first["msg"].split())
        raise DatasetError(f"{path}{place}: {told}") from error


def _documents(question: int, passages: Sequence[_Passage]) -> list[Document]:
    return [
        Document(f"{question}-{place}", (f"{one.title}\n{one.text}" if one.title else one.text,))
        for place, one in enumerate(passages)
    ]
