"""A prompt of the corpus: documents, retrieved chunks, a question, and the text around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cacheblend_rag import Document

QuestionKind = Literal["direct", "referring"]
SegmentKind = Literal["text", "chunk"]

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


HEAD = f"<bos>{INSTRUCTION}\n\n"
"""What prompts of plain text begin with."""


def documents(*prompts: DemoPrompt) -> list[Document]:
    """Return the documents that prompts are about."""
    return [Document(d.document_id, d.chunks) for prompt in prompts for d in prompt.documents]


def text(prompt: DemoPrompt) -> str:
    """Return a prompt with its passages and question."""
    passages = "\n\n".join(prompt.chunk_texts)
    return f"{HEAD}{passages}\n\nQuestion: {prompt.question.question}\nAnswer:"
