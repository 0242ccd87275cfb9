"""Compares several methods of answering on one set of questions and documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from cacheblend_rag.demo.corpus import DemoQuestion
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.quality.dataset import EvalQuestion
from cacheblend_rag.quality.methods import METHODS, Method
from cacheblend_rag.quality.metrics import exact_match
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.report import BlendReport
from cacheblend_rag.settings import LeadInKind
from cacheblend_rag.text.chunk import Document

RETRIEVED = 5
MAX_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """One method's answer to one question."""

    text: str
    correct: bool
    report: BlendReport

    @property
    def first_token_seconds(self) -> float:
        """Time to first token."""
        return self.report.seconds.time_to_first_token

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "text": self.text,
            "correct": self.correct,
            "reused_tokens": self.report.reused_tokens,
            "recomputed_tokens": self.report.recomputed_tokens,
            "ttft_seconds": self.first_token_seconds,
        }


@dataclass(frozen=True)
class SettingAnswers:
    """One question and each method's answer, by the method's name."""

    question: EvalQuestion
    prompt_tokens: int
    answers: dict[str, Answer]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "question": self.question.question,
            "gold": self.question.answers[0],
            "documents": [document.document_id for document in self.question.documents],
            "prompt_tokens": self.prompt_tokens,
            "answers": {name: answer.to_dict() for name, answer in self.answers.items()},
        }


@dataclass(frozen=True)
class Summary:
    """One method's totals over all questions; TTFT is the median, tokens are means per question.

    Tokens are counted as in BlendReport: reused, recomputed, computed (without cached KV).
    """

    method: Method
    correct: int
    reused_tokens: float
    recomputed_tokens: float
    computed_tokens: float
    ttft_seconds: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "method": self.method.name,
            "correct": self.correct,
            "reused_tokens": self.reused_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "computed_tokens": self.computed_tokens,
            "ttft_seconds": self.ttft_seconds,
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class Comparison:
    """Answers the same questions over the same documents by every method.

    engines: one per lead-in that a method uses, around one model. instruction: the beginning of
    prompts; the engines' own instruction is its lead_text. documents: the documents to index.
    """

    engines: Mapping[LeadInKind, Engine]
    instruction: str
    documents: Sequence[Document]
    questions: Sequence[EvalQuestion]

    def index(self) -> int:
        """Precompute the documents once per lead-in; returns the number of chunks."""
        reports = [engine.precompute(self.documents) for engine in self.engines.values()]
        return reports[0].computed + reports[0].skipped

    def answer_all(self) -> Iterator[SettingAnswers]:
        """Answer every question by every method, after one untimed answer by each."""
        for method in METHODS:
            self._generate(self.questions[0], method)
        for question in self.questions:
            answers = {m.name: self._answer(question, m) for m in METHODS}
            prompt_tokens = next(iter(answers.values())).report.prompt_tokens
            yield SettingAnswers(question, prompt_tokens, answers)

    def _answer(self, question: EvalQuestion, method: Method) -> Answer:
        generation = self._generate(question, method)
        correct = bool(exact_match(generation.text, question.answers))
        return Answer(generation.text.strip(), correct, generation.report)

    def _generate(self, question: EvalQuestion, method: Method) -> Generation:
        prompt = question.prompt(self.instruction)
        sampling = SamplingParams.greedy(max_tokens=MAX_ANSWER_TOKENS, stop=("\n",))
        if method.lead_in is None:
            return next(iter(self.engines.values())).generate_full(prompt, sampling)
        engine = self.engines[method.lead_in]
        config = engine.config.with_changes(
            selector=method.selector,
            recompute_ratio=method.ratio,
            **ALWAYS,
        )
        return engine.generate(prompt, sampling, config=config)


def with_retrieved(
    drawn: Sequence[DemoQuestion], retrieve: Callable[[str, int], Sequence[Document]]
) -> tuple[EvalQuestion, ...]:
    """Return questions over the whole documents that ``retrieve`` returns, best first."""
    asked = []
    for item in drawn:
        found = tuple(retrieve(item.question, RETRIEVED))
        passages = tuple(chunk for document in found for chunk in document.to_chunks())
        asked.append(EvalQuestion(item.question, (item.answer,), passages, found, kind=item.kind))
    return tuple(asked)


def summarize(method: Method, answered: Sequence[SettingAnswers]) -> Summary:
    """Summarize one method's answers, compared with those of full prefill."""
    answers = [found.answers[method.name] for found in answered]
    full = median(found.answers["full"].first_token_seconds for found in answered)
    seconds = median(answer.first_token_seconds for answer in answers)
    return Summary(
        method=method,
        correct=sum(answer.correct for answer in answers),
        reused_tokens=mean(answer.report.reused_tokens for answer in answers),
        recomputed_tokens=mean(answer.report.recomputed_tokens for answer in answers),
        computed_tokens=mean(answer.report.computed_tokens for answer in answers),
        ttft_seconds=seconds,
        speedup=full / seconds,
    )
