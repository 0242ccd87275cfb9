"""Prompts of the corpus, from ``corpus.json``: documents, retrieved chunks, a question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cacheblend_rag import Document

QuestionKind = Literal["direct", "referring"]
SegmentKind = Literal["text", "chunk"]

SETTINGS = ("adjacent", "fragments", "shuffled")
INSTRUCTION = "Read the notes below and answer the question. Give a short answer."
CHUNK_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PromptFrame:
    """The fixed text before the chunks (`head`) and after them (`tail`, holding `{question}`)."""

    head: str
    tail: str


DEFAULT_FRAME = PromptFrame(f"{INSTRUCTION}\n\n", "\n\nQuestion: {question}\nAnswer:")
OTHER_HEAD = "Context information is below.\n---------------------\n"
"""The beginning of another prompt."""


@dataclass(frozen=True)
class DemoDocument:
    """One document, as the passages it is indexed in."""

    document_id: str
    chunks: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole document."""
        return CHUNK_SEPARATOR.join(self.chunks)


@dataclass(frozen=True)
class DemoQuestion:
    """A question, its answer, and the document and chunk (by index) that hold the answer."""

    question: str
    answer: str
    kind: QuestionKind
    document: int
    chunk: int


@dataclass(frozen=True)
class DemoPrompt:
    """One question over retrieved chunks, given as (document, chunk) indices in prompt order."""

    documents: tuple[DemoDocument, ...]
    retrieved: tuple[tuple[int, int], ...]
    question: DemoQuestion
    setting: str

    @property
    def chunk_texts(self) -> tuple[str, ...]:
        """The retrieved chunks in prompt order."""
        return tuple(self.documents[d].chunks[c] for d, c in self.retrieved)

    def segments(self) -> list[tuple[SegmentKind, str]]:
        """The prompt as runs of text that are each tokenized by themselves."""
        parts: list[tuple[SegmentKind, str]] = [("text", DEFAULT_FRAME.head)]
        for index, chunk in enumerate(self.chunk_texts):
            if index:
                parts.append(("text", CHUNK_SEPARATOR))
            parts.append(("chunk", chunk))
        parts.append(("text", DEFAULT_FRAME.tail.format(question=self.question.question)))
        return parts


def generate_prompts(setting: str, count: int, seed: int) -> list[DemoPrompt]:
    """Return the first prompts of one question each that are kept of a setting and a seed.

    setting: ``adjacent`` (whole documents in order), ``fragments`` (only the chunks that refer
    back, and only questions about them) or ``shuffled`` (all chunks in random order).
    """
    kept = _corpus()["prompts"][f"{setting}/{seed}"][:count]
    assert len(kept) == count, "corpus.json holds fewer"
    return [
        DemoPrompt(
            tuple(_documents(one["documents"])),
            tuple((document, chunk) for document, chunk in one["retrieved"]),
            DemoQuestion(**one["question"]),
            setting,
        )
        for one in kept
    ]


def generate_collection(
    documents: int, questions: int, seed: int
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Return the collection for retrieval that is kept of these numbers.

    Questions name their subject in full, and ``question.document`` indexes the collection.
    """
    kept = _corpus()["collections"][f"{documents}/{questions}/{seed}"]
    return _documents(kept["documents"]), [DemoQuestion(**one) for one in kept["questions"]]


@cache
def _corpus() -> Any:
    return json.loads(Path(__file__).with_name("corpus.json").read_text())


def _documents(kept: list[dict[str, Any]]) -> list[DemoDocument]:
    return [DemoDocument(one["id"], tuple(one["chunks"])) for one in kept]


HEAD = f"<bos>{INSTRUCTION}\n\n"
"""What prompts of plain text begin with."""


def documents(*prompts: DemoPrompt) -> list[Document]:
    """Return the documents that prompts are about."""
    return [Document(d.document_id, d.chunks) for prompt in prompts for d in prompt.documents]


def text(prompt: DemoPrompt) -> str:
    """Return a prompt with its passages and question."""
    passages = "\n\n".join(prompt.chunk_texts)
    return f"{HEAD}{passages}\n\nQuestion: {prompt.question.question}\nAnswer:"
