"""Real passages, and questions about them, from the data set MuSiQue.

``musique`` is a sample of a few, ``single_hop`` an evaluation of its own; the NOTICE of each gives
the source, the licence and the changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from cacheblend_rag.text.chunk import Document

FOLDER = Path(__file__).parent / "musique"
FILE = FOLDER / "passages.json"
QUESTIONS = 6  # that `demo` and `verify` ask: a minute on two CPU cores
NOTICE = FOLDER / "NOTICE"
SINGLE_HOP = "single-hop"  # names the packaged questions
SINGLE_HOP_FILE = Path(__file__).parent / "single_hop" / "questions.json"


@dataclass(frozen=True)
class Passage:
    """A paragraph of an encyclopedia, with a title."""

    title: str
    text: str


@dataclass(frozen=True)
class PassageQuestion:
    """A question that one passage answers.

    Args:
        question: the question.
        answers: right answers, at least one; the passage contains each.
        title: of the passage.
    """

    question: str
    answers: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class PassageSample:
    """Passages, and questions that they answer."""

    passages: tuple[Passage, ...]
    questions: tuple[PassageQuestion, ...]

    def documents(self) -> tuple[Document, ...]:
        """Return the passages as documents for indexing, one each, with the title as id."""
        return tuple(Document(passage.title, (passage.text,)) for passage in self.passages)

    def save(self, folder: Path) -> None:
        """Write one text file per passage, and NOTICE, into a new folder; raises OSError."""
        folder.mkdir(parents=True)
        for passage in self.passages:
            (folder / f"{passage.title}.txt").write_text(f"{passage.text}\n", encoding="utf-8")
        (folder / NOTICE.name).write_text(NOTICE.read_text(encoding="utf-8"), encoding="utf-8")


def load_passages() -> PassageSample:
    """Read the sample that ships with the package."""
    return TypeAdapter(PassageSample).validate_json(FILE.read_bytes())


class RealTexts(NamedTuple):
    """All real passages and questions in the package, each once."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]


def load_real_texts() -> RealTexts:
    """Read the sample's texts, and those of the single-hop questions."""
    sample, asked = load_passages(), json.loads(SINGLE_HOP_FILE.read_bytes())["questions"]
    passages = [passage.text for passage in sample.passages]
    passages += [text for item in asked for one in item["documents"] for text in one["chunks"]]
    questions = [one.question for one in sample.questions] + [one["question"] for one in asked]
    once = {text.strip().casefold(): text.strip() for text in reversed(passages)}
    return RealTexts(tuple(reversed(once.values())), tuple(dict.fromkeys(questions)))
