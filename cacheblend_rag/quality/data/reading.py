"""What every form of file is read by: its options, and questions over passages that stand alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.quality.data.fields import Field
from cacheblend_rag.quality.dataset import (
    DEFAULT_INSTRUCTION,
    DEFAULT_KIND,
    EvalDataset,
    EvalQuestion,
)
from cacheblend_rag.text.chunk import Document

DISTRACTORS = 9
UNANSWERABLE = "unanswerable"
"""The kind of questions that no passage answers, and their answer."""
UNANSWERABLE_INSTRUCTION = (
    f'{DEFAULT_INSTRUCTION} If the notes do not hold it, answer "{UNANSWERABLE}".'
)


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read.

    seed: for the order of questions and distractors where the form has none. distractors: most
    passages of the same article beside the gold one, where the form does not choose them.
    unanswerable: whether questions without an answer are kept, with ``unanswerable`` as answer.
    """

    seed: int = 0
    distractors: int = DISTRACTORS
    unanswerable: bool = False


@dataclass(frozen=True)
class Form:
    """A form of files with questions.

    title: for errors. recognise: whether a file's value, read from JSON, has this form.
    read: makes a data set of the value, the file's name without its ending, and options; raises
    DatasetError when a field is missing or malformed.
    """

    title: str
    recognise: Callable[[Any], bool]
    read: Callable[[Field, str, ReadOptions], EvalDataset]


def items_have(name: str) -> Callable[[Any], bool]:
    """Return whether a value is a list whose first item is an object with such a field."""
    return lambda value: isinstance(value, list) and bool(value) and _has(value[0], name)


def over_passages(
    question: str,
    answers: tuple[str, ...],
    documents: Sequence[Document],
    gold: Sequence[int] = (),
    kind: str = DEFAULT_KIND,
) -> EvalQuestion:
    """Return a question over documents of one chunk each, all retrieved; gold: by index."""
    passages = tuple(document.to_chunks()[0] for document in documents)
    return EvalQuestion(
        question,
        answers,
        passages,
        tuple(documents),
        kind=kind,
        gold=tuple(passages[place] for place in gold),
    )


def answered_or_not(name: str, questions: Sequence[EvalQuestion]) -> EvalDataset:
    """Return a data set whose instruction says what to answer if the passages do not."""
    unanswerable = any(question.kind == UNANSWERABLE for question in questions)
    instruction = UNANSWERABLE_INSTRUCTION if unanswerable else DEFAULT_INSTRUCTION
    return EvalDataset(name, tuple(questions), instruction)


def _has(item: Any, name: str) -> bool:
    return isinstance(item, dict) and name in item
