"""Questions of an evaluation over the corpus."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.text.chunk import Document

from .corpus import (
    CHUNK_SEPARATOR,
    INSTRUCTION,
    SETTINGS,
    DemoDocument,
    DemoPrompt,
    generate_prompts,
)


def toy_dataset(settings: Sequence[str], questions: int, seed: int) -> EvalDataset:
    """Return questions over the corpus, so many per setting; () is all."""
    drawn = tuple(
        _toy_question(prompt)
        for setting in settings or SETTINGS
        for prompt in generate_prompts(setting, questions, seed)
    )
    return EvalDataset("toy", drawn, INSTRUCTION)


def toy_documents(documents: Sequence[DemoDocument]) -> tuple[Document, ...]:
    """Return documents of the corpus in the form for indexing."""
    return tuple(Document(d.document_id, d.chunks, CHUNK_SEPARATOR) for d in documents)


def _toy_question(prompt: DemoPrompt) -> EvalQuestion:
    documents = toy_documents(prompt.documents)
    chunks = [document.to_chunks() for document in documents]
    return EvalQuestion(
        question=prompt.question.question,
        answers=(prompt.question.answer,),
        passages=tuple(chunks[d][c] for d, c in prompt.retrieved),
        documents=documents,
        setting=prompt.setting,
    )
