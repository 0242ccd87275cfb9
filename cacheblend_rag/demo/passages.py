"""A sample of real passages, and questions about them, from the data set MuSiQue.

``musique/NOTICE`` gives the source, the licence and the changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.text.chunk import Document

FOLDER = Path(__file__).parent / "musique"
FILE = FOLDER / "passages.json"
NOTICE = FOLDER / "NOTICE"


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
