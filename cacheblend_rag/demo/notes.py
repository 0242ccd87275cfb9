"""The toy model's notes: documents, and questions about them with answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.demo.corpus import DemoDocument, DemoQuestion, generate_collection

DOCUMENTS = 24
SEED = 11


@dataclass(frozen=True)
class Notes:
    """Documents, and questions that they answer."""

    documents: tuple[DemoDocument, ...]
    questions: tuple[DemoQuestion, ...]

    def save(self, folder: Path) -> None:
        """Write one text file per document into a new folder; raises OSError."""
        folder.mkdir(parents=True)
        for document in self.documents:
            (folder / f"{document.document_id}.txt").write_text(f"{document.text}\n")


def draw_notes(questions: int) -> Notes:
    """Draw the demo's notes, always the same ones, and so many questions about them."""
    documents, drawn = generate_collection(DOCUMENTS, questions, SEED)
    return Notes(tuple(documents), tuple(drawn))
