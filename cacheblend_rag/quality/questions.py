"""Chooses the questions of an evaluation, from a file or the demo's corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cacheblend_rag.demo.corpus import (
    CHUNK_SEPARATOR,
    INSTRUCTION,
    SETTINGS,
    DemoDocument,
    DemoPrompt,
    generate_prompts,
)
from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, load_dataset
from cacheblend_rag.text.chunk import Document

DEMO = "demo"


def choose_questions(
    source: str,
    settings: Sequence[str],
    questions: int,
    passages: int | None,
    seed: int,
) -> EvalDataset:
    """Return at most so many questions per setting.

    source: ``demo`` or a file of questions. settings: all of the source's if empty. passages: at
    most so many per question; None for all. seed: for drawing the demo's questions.
    Raises ConfigError, DatasetError on an unknown setting, and the errors of load_dataset.
    """
    demo = source == DEMO
    data = demo_dataset(settings, questions, seed) if demo else load_dataset(Path(source))
    for setting in settings:
        if setting not in data.settings:
            raise DatasetError(f"{source}: setting {setting!r} must be one of {data.settings}")
    chosen = tuple(
        question.first_passages(passages) if passages else question
        for setting in settings or data.settings
        for question in data.of_setting(setting)[:questions]
    )
    return EvalDataset(data.name, chosen, data.instruction)


def demo_dataset(settings: Sequence[str], questions: int, seed: int) -> EvalDataset:
    """Draw questions about held-out subjects of the demo's corpus, so many per setting.

    Raises ConfigError on a setting that the corpus does not have.
    """
    for setting in settings:
        if setting not in SETTINGS:
            raise ConfigError(f"setting={setting!r} must be one of {', '.join(SETTINGS)}")
    drawn = tuple(
        _demo_question(prompt)
        for setting in settings or SETTINGS
        for prompt in generate_prompts(setting, questions, seed)
    )
    return EvalDataset(DEMO, drawn, INSTRUCTION)


def demo_documents(documents: Sequence[DemoDocument]) -> tuple[Document, ...]:
    """Return documents of the demo's corpus in the form for indexing."""
    return tuple(Document(d.document_id, d.chunks, CHUNK_SEPARATOR) for d in documents)


def _demo_question(prompt: DemoPrompt) -> EvalQuestion:
    documents = demo_documents(prompt.documents)
    chunks = [document.to_chunks() for document in documents]
    return EvalQuestion(
        question=prompt.question.conversation,
        answers=(prompt.question.answer,),
        passages=tuple(chunks[d][c] for d, c in prompt.retrieved),
        documents=documents,
        setting=prompt.setting,
        kind=prompt.question.kind,
    )
