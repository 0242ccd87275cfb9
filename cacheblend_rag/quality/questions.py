"""Chooses the questions of an evaluation from a file.

A file is JSON or JSON lines, in one of three forms:

- passages: ``{"question": str, "answers": [str, ...], "ctxs": [{"title": str, "text": str}, ...]}``
  of each question;
- MuSiQue (arXiv 2108.00573): ``{"question": str, "answer": str, "answer_aliases": [str, ...],
  "answerable": bool, "paragraphs": [{"title": str, "paragraph_text": str, "is_supporting": bool},
  ...]}``, whose supporting paragraphs are gold; what has no answer is left out;
- this project's, which ``quality.dataset`` describes.

In the first two every passage is a document of its own; a title that is not empty stands on a line
above its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from cacheblend_rag.demo.passages import SINGLE_HOP, SINGLE_HOP_FILE
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.dataset import (
    DEFAULT_INSTRUCTION,
    DEFAULT_SETTING,
    EvalDataset,
    EvalQuestion,
)
from cacheblend_rag.quality.measure import ANSWER_TOKENS
from cacheblend_rag.settings.base import AsTuple, Positive, Settings
from cacheblend_rag.text.chunk import SEPARATOR, Document

KNOWN = "a list of questions with answers and ctxs, MuSiQue, this project's format"
ValueT = TypeVar("ValueT")
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Place = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
"""A document and its chunk, by index."""


def _names(value: Any) -> Any:
    return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


class QuestionSettings(Settings):
    """How questions are taken from a file, and answered."""

    _noun: ClassVar[str] = "setting of questions"

    settings: Annotated[tuple[str, ...], AsTuple, BeforeValidator(_names)] = ()
    """Those of the file to take; all of them by default."""
    max_tokens: Positive = ANSWER_TOKENS
    """Most tokens of an answer."""


def choose_questions(source: str, questions: int, settings: Sequence[str] = ()) -> EvalDataset:
    """Return at most so many questions of each setting; all settings by default.

    source: ``single-hop`` (which comes with the package), or a file of questions. Raises
    DatasetError for a setting that the questions do not have, and the errors of load_dataset.
    """
    data = load_dataset(SINGLE_HOP_FILE if source == SINGLE_HOP else Path(source))
    for setting in settings:
        if setting not in data.settings:
            raise DatasetError(f"{source}: setting {setting!r} must be one of {data.settings}")
    chosen = (data.of_setting(setting)[:questions] for setting in settings or data.settings)
    return replace(data, questions=tuple(chain(*chosen)))


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Passage(_Form):
    title: str = ""
    text: Text = Field(validation_alias=AliasChoices("text", "paragraph_text"))
    is_supporting: bool = False

    @property
    def whole(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


class _Asked(_Form):
    question: Text
    answers: Texts
    answerable: bool = True
    ctxs: Annotated[list[_Passage], Field(min_length=1)] = Field(
        validation_alias=AliasChoices("ctxs", "paragraphs")
    )

    @model_validator(mode="before")
    @classmethod
    def _with_aliases(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "answer" not in value:
            return value
        return {**value, "answers": [value["answer"], *(value.get("answer_aliases") or ())]}

    def read(self, index: int) -> EvalQuestion:
        texts = [passage.whole for passage in self.ctxs]
        documents = [Document(f"{index}-{at}", (text,)) for at, text in enumerate(texts)]
        gold = [at for at, passage in enumerate(self.ctxs) if passage.is_supporting]
        answers = tuple(dict.fromkeys(self.answers))
        return over_passages(self.question.strip(), answers, documents, gold)


class _Document(_Form):
    id: Text
    chunks: Texts
    separator: str = SEPARATOR


class _Question(_Form):
    question: Text
    answers: Texts
    documents: Annotated[list[_Document], Field(min_length=1)]
    passages: Annotated[list[Place], Field(min_length=1)]
    gold: list[Place] = []
    question_first: bool = False
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
        return EvalQuestion(
            self.question, answers, passages, documents, self.setting, gold, self.question_first
        )


class _Questions(_Form):
    format: Literal["cacheblend-rag/eval"]
    version: Literal[1]
    name: Text | None = None
    instruction: str = DEFAULT_INSTRUCTION
    questions: Annotated[list[_Question], Field(min_length=1)]


def load_dataset(path: Path) -> EvalDataset:
    """Read a file in any of the forms.

    Raises DatasetError, naming file and field, when it cannot be read, has no known form or is
    malformed.
    """
    value = _parse(path)
    if isinstance(value, dict) and "format" in value:
        saved = _read(path, _Questions, value)
        questions = tuple(one.read() for one in saved.questions)
        return EvalDataset(saved.name or path.stem, questions, saved.instruction)
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict) or not {"ctxs", "paragraphs"} & first.keys():
        raise DatasetError(f"{path}: the form is not recognised; it must be one of: {KNOWN}")
    asked = enumerate(_read(path, list[_Asked], value))
    questions = tuple(one.read(at) for at, one in asked if one.answerable)
    if not questions:
        raise DatasetError(f"{path} has no answerable question")
    return EvalDataset(path.stem, questions)


def over_passages(
    question: str, answers: tuple[str, ...], documents: Sequence[Document], gold: Sequence[int] = ()
) -> EvalQuestion:
    """Return a question over documents of one chunk each, all retrieved; gold: by index."""
    passages = tuple(document.to_chunks()[0] for document in documents)
    golds = tuple(passages[place] for place in gold)
    return EvalQuestion(question, answers, passages, tuple(documents), gold=golds)


def _parse(path: Path) -> Any:
    """Return a file's JSON value; JSON lines, of which there may be only one, make a list."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                raise
            lines = re.sub(r"\n(?=.)", ",\n", text.strip())
            value = json.loads(f"[{lines}]")
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: cannot be read as JSON ({error})") from error
    return [value] if isinstance(value, dict) and "question" in value else value


def _read(path: Path, form: type[ValueT], value: Any) -> ValueT:
    try:
        return TypeAdapter(form).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{at}]" if isinstance(at, int) else f": {at}" for at in first["loc"])
        told = " ".join(first["msg"].split())
        raise DatasetError(f"{path}{place}: {told}") from error
