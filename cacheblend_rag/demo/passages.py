"""Real passages, and questions about them, from the data set MuSiQue.

``musique`` is a sample of a few, ``single_hop`` an evaluation of its own; the NOTICE of each gives
the source, the licence and the changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.text.chunk import Document

FOLDER = Path(__file__).parent / "musique"
FILE = FOLDER / "passages.json"
QUESTIONS = 6  # that `verify` asks
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
    plain = json.loads(FILE.read_text(encoding="utf-8"))
    return PassageSample(
        tuple(Passage(**passage) for passage in plain["passages"]),
        tuple(
            PassageQuestion(item["question"], tuple(item["answers"]), item["title"])
            for item in plain["questions"]
        ),
    )


@dataclass(frozen=True)
class RealTexts:
    """All real passages and questions in the package; no passage contains another one."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]


def load_real_texts() -> RealTexts:
    """Read the sample's texts, and those of the single-hop questions."""
    sample = load_passages()
    asked = json.loads(SINGLE_HOP_FILE.read_text(encoding="utf-8"))["questions"]
    chunks = (text for item in asked for one in item["documents"] for text in one["chunks"])
    passages = (*(passage.text for passage in sample.passages), *chunks)
    questions = (*(one.question for one in sample.questions), *(one["question"] for one in asked))
    return RealTexts(
        _none_in_another(tuple(text.strip() for text in passages)), tuple(dict.fromkeys(questions))
    )


def _none_in_another(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts that no other one holds; of those that differ in case only, the first."""
    first = {text.casefold(): text for text in reversed(texts)}
    held = [key for key in first if any(key in other and key != other for other in first)]
    return tuple(first[key] for key in reversed(first) if key not in held)
