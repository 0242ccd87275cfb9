"""Answers questions over passages by full prefill, plain reuse and blend, from the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cacheblend_rag.demo.passages import PassageQuestion
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.quality.metrics import holds_answer
from cacheblend_rag.report import PrecomputeReport
from cacheblend_rag.text.chunk import Document

RETRIEVED = 8
MAX_TOKENS = 16


@dataclass(frozen=True)
class Answers:
    """A question and its greedy answers, all from the same prompt.

    titles: of the retrieved passages, in the order of the prompt. reuse: with the passages' KV as
    it was stored, nothing recomputed.
    """

    question: PassageQuestion
    titles: tuple[str, ...]
    full: Generation
    reuse: Generation
    blend: Generation

    def same(self, generation: Generation) -> bool:
        """Whether an answer is the same text as full prefill's."""
        return self.full.text.strip() == generation.text.strip()

    def right(self, generation: Generation) -> bool:
        """Whether an answer contains a right answer word for word."""
        return holds_answer(generation.text, self.question.answers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "question": self.question.question,
            "gold": self.question.answers[0],
            "passages": list(self.titles),
            "full": self._plain(self.full),
            "reuse": self._plain(self.reuse),
            "blend": self._plain(self.blend),
        }

    def _plain(self, generation: Generation) -> dict[str, Any]:
        return {
            "text": generation.text.strip(),
            "right": self.right(generation),
            "report": generation.report.to_dict(),
        }


def totals_of(answered: Sequence[Answers]) -> dict[str, Any]:
    """Return totals over at least one answer, as plain JSON values.

    Seconds are medians of the time to first token, tokens medians. ``..._right``: answers that
    contain a right one; ``..._same``: those with full prefill's text. speedup: of blend.
    """
    blends = [one.blend.report for one in answered]
    totals: dict[str, Any] = {
        "questions": len(answered),
        "prompt_tokens": median(report.prompt_tokens for report in blends),
        "reused_tokens": median(report.reused_tokens for report in blends),
        "not_blended": [str(report.reason) for report in blends if not report.blended],
    }
    for way in ("full", "reuse", "blend"):
        found = [getattr(one, way) for one in answered]
        pairs = list(zip(answered, found, strict=True))
        totals[f"{way}_seconds"] = median(map(_first_token, found))
        totals[f"{way}_right"] = sum(one.right(generation) for one, generation in pairs)
        if way != "full":
            totals[f"{way}_same"] = sum(one.same(generation) for one, generation in pairs)
    return {**totals, "speedup": totals["full_seconds"] / totals["blend_seconds"]}


@dataclass(frozen=True)
class SideBySide:
    """A model that answers questions over passages by full prefill, plain reuse and blend.

    engine: its instruction is the text that ``render`` puts before the first passage. documents:
    the passages. retrieve: returns so many documents for a question, best first. render: makes a
    prompt of a question and passages.
    """

    engine: Engine
    documents: Sequence[Document]
    retrieve: Callable[[str, int], Sequence[Document]]
    render: Callable[[str, tuple[str, ...]], PromptLike]

    def index(self) -> PrecomputeReport:
        """Compute and store the KV of every passage, once."""
        return self.engine.precompute(self.documents, progress=False)

    def answer_all(self, questions: Sequence[PassageQuestion]) -> Iterator[Answers]:
        """Answer every question in each way, after one untimed answer each."""
        self._answer(questions[0], max_tokens=1)
        for question in questions:
            yield self._answer(question, MAX_TOKENS)

    def _answer(self, question: PassageQuestion, max_tokens: int) -> Answers:
        found = self.retrieve(question.question, RETRIEVED)
        chunks = [chunk for document in found for chunk in document.to_chunks()]
        prompt = self.render(question.question, tuple(chunk.text for chunk in chunks))
        greedy = SamplingParams.greedy(max_tokens=max_tokens, stop=("\n",))
        # Without the cost model, a busy machine does not turn a blend into ordinary prefill. Full
        # prefill computes the instruction, so the blend does, too.
        config = self.engine.config.with_changes(cost_model=False, reuse_prefix=False)
        plain = config.with_changes(recompute_ratio=0.0)
        return Answers(
            question,
            tuple(document.document_id for document in found),
            full=self.engine.generate_full(prompt, greedy, hints=chunks),
            reuse=self.engine.generate(prompt, greedy, config=plain, hints=chunks),
            blend=self.engine.generate(prompt, greedy, config=config, hints=chunks),
        )


def _first_token(generation: Generation) -> float:
    return generation.report.seconds.time_to_first_token
