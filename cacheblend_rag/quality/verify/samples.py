"""The small set of prompts that a model is verified with."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_rag.demo.passages import PassageQuestion, PassageSample, load_passages
from cacheblend_rag.errors import PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.fidelity import TOKENS
from cacheblend_rag.quality.frame import PromptFrame
from cacheblend_rag.text.encoder import PromptEncoder

QUESTIONS, PASSAGES = 6, 4


def sample_questions() -> EvalDataset:
    """Return packaged questions over paragraphs of Wikipedia.

    Each question gets the paragraph that answers it behind some others.
    """
    sample = load_passages()
    chosen = sample.questions[:QUESTIONS]
    return EvalDataset("packaged", tuple(_over_passages(sample, one) for one in chosen))


def fitting(
    data: EvalDataset, frame: PromptFrame, encoder: PromptEncoder, context_window: int
) -> EvalDataset:
    """Return the questions over so many passages as fit a model's context window.

    Raises PromptError when a question and one passage do not fit.
    """
    found = tuple(_fitting(one, frame, encoder, context_window) for one in data.questions)
    return replace(data, questions=found)


def _fitting(
    question: EvalQuestion, frame: PromptFrame, encoder: PromptEncoder, context_window: int
) -> EvalQuestion:
    for count in range(len(question.passages), 0, -1):
        shorter = question.first_passages(count)
        tokens = len(frame.prompt(shorter).encode(encoder).token_ids)
        if tokens + TOKENS <= context_window:
            return shorter
    raise PromptError(
        f"question {question.question!r} with one passage does not fit the context window of "
        f"{context_window:,} tokens: give a dataset with shorter passages"
    )


def _over_passages(sample: PassageSample, asked: PassageQuestion) -> EvalQuestion:
    titles = [passage.title for passage in sample.passages]
    at = titles.index(asked.title)
    own, *others = [*sample.documents()[at:], *sample.documents()[:at]][:PASSAGES]
    documents = (*others, own)
    passages = tuple(document.to_chunks()[0] for document in documents)
    return EvalQuestion(asked.question, asked.answers, passages, documents)
