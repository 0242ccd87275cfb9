"""A prompt of the corpus: documents, retrieved chunks, a question, and the text around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QuestionKind = Literal["direct", "referring"]
SegmentKind = Literal["text", "chunk"]

INSTRUCTION = "Read the notes below and answer the question. Give a short answer."
CHUNK_SEPARATOR = "\n\n"
UNKNOWN = "not known"


@dataclass(frozen=True)
class PromptFrame:
    """The fixed text before the chunks (`head`) and after them (`tail`, holding `{question}`)."""

    head: str
    tail: str


DEFAULT_FRAME = PromptFrame(f"{INSTRUCTION}\n\n", "\n\nQuestion: {question}\nAnswer:")
OTHER_FRAMES = (
    PromptFrame(
        "Context information is below.\n---------------------\n",
        "\n---------------------\nGiven the context information and not prior knowledge, "
        "answer the query.\nQuery: {question}\nAnswer: ",
    ),
    PromptFrame(
        "You answer questions from documents. Use only the context.\n\n"
        "Context information is below.\n---------------------\n",
        "\n---------------------\nGiven the context information, answer the query.\n"
        "Query: {question}\nAnswer:",
    ),
    PromptFrame(
        "Use the following pieces of context to answer the question at the end. "
        "If you don't know the answer, just say that you don't know.\n\n",
        "\n\nQuestion: {question}\nHelpful Answer:",
    ),
    PromptFrame("Answer from the context.\n\nContext:\n", "\n\nQuestion: {question}\nAnswer:"),
    PromptFrame("You are a helpful assistant.\n\n", "\n\n{question}\nAnswer:"),
)


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
    """A question, its answer, and the document and chunk (by index) that hold the answer.

    The answer is `UNKNOWN` where that chunk was not retrieved. `earlier` holds the questions and
    answers of the conversation before this question, which may say "she" for their subject.
    """

    question: str
    answer: str
    kind: QuestionKind
    document: int
    chunk: int
    earlier: tuple[tuple[str, str], ...] = ()

    @property
    def conversation(self) -> str:
        """The question after all that was asked and answered before it."""
        before = "".join(f"{q}\nAnswer: {a}\n\nQuestion: " for q, a in self.earlier)
        return f"{before}{self.question}"


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

    def segments(self, frame: PromptFrame = DEFAULT_FRAME) -> list[tuple[SegmentKind, str]]:
        """The prompt as runs of text that are each tokenized by themselves."""
        parts: list[tuple[SegmentKind, str]] = [("text", frame.head)]
        for index, chunk in enumerate(self.chunk_texts):
            if index:
                parts.append(("text", CHUNK_SEPARATOR))
            parts.append(("chunk", chunk))
        parts.append(("text", frame.tail.format(question=self.question.conversation)))
        return parts
