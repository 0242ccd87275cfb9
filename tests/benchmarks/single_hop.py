"""Makes a data set of single-hop questions that a small model answers from its passages only."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli import output
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.data.reading import over_passages
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.metrics import exact_match, holds_answer, normalize_answer, token_f1
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.settings import EMBEDDED
from cacheblend_rag.text.chunk import Document
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app
from tests.benchmarks.written_questions import (
    WrittenQuestion,
    paragraphs_of,
    with_capitals,
    write_questions,
)

INSTRUCTION = (
    "Read the notes below and answer the question. Give only the answer itself, in a few words, "
    "as the notes have it."
)
NAME = "single-hop"


@dataclass(frozen=True, kw_only=True)
class SingleHopPlan(Plan):
    """Single-hop questions over several passages, as a model answers them by full prefill.

    Of a file whose questions have one gold passage each (SQuAD), the questions are used; of others
    only the passages: questions are written by rules from their first sentences. A question is kept
    if the model answers it with all passages, but neither without passages nor with the
    distractors alone.
    """

    data: str = option("", "A file of questions in any form that `eval` reads.")
    out: str = option("", "The file to write the kept questions to; none by default.")
    model: str = option(DEFAULT_MODEL, "The model that answers; its chat template is used.")
    dtype: str = option("float32", "float32, bfloat16 or float16.")
    passages: int = option(4, "Passages per question, one of which holds the answer.", least=2)
    candidates: int = option(120, "Most questions that are tried, kinds in turn.", least=1)
    seed: int = option(0, "Seed for distractors and their order.")
    with_f1: float = option(0.5, "Least F1 of a kept question with all passages.", least=0)
    without_f1: float = option(0.15, "Most F1 without passages.", least=0)
    distractors_f1: float = option(0.2, "Most F1 with the distractors alone.", least=0)


@dataclass(frozen=True)
class _Tried:
    """A question and its F1 and exact match with all passages, with none, and with distractors.

    The latter two are missing if the first F1 is too low to keep it.
    """

    question: EvalQuestion
    f1: dict[str, float]
    exact: dict[str, float]

    def is_kept(self, plan: SingleHopPlan) -> bool:
        return (
            len(self.f1) == 3
            and self.f1["none"] <= plan.without_f1
            and self.f1["distractors"] <= plan.distractors_f1
        )


def measure_single_hop(plan: SingleHopPlan, advance: Advance) -> dict[str, Any]:
    """Ask the candidates, write the kept ones, and return the mean scores.

    Only what the model answers with all passages is also asked without them.
    """
    candidates = find_candidates(plan)
    if not candidates:
        raise DatasetError(f"{plan.data}: no single-hop question is found in it")
    tried = []
    with closing(open_engine(EMBEDDED, model=plan.model, dtype=plan.dtype)) as engine:
        asker = _Asker(engine)
        for index, question in enumerate(candidates):
            advance(f"{index + 1} of {len(candidates)} questions")
            tried.append(asker.tried(question, plan.with_f1))
    kept = [one for one in tried if one.is_kept(plan)]
    if plan.out and kept:
        questions = tuple(one.question for one in kept)
        EvalDataset(NAME, questions, INSTRUCTION).save(Path(plan.out))
    rows = [_row("all", tried), _row("kept", kept)]
    return {"model": plan.model, "rows": rows}


def find_candidates(plan: SingleHopPlan) -> list[EvalQuestion]:
    """Return questions over a gold passage and distractors, which do not hold the answer."""
    data = load_dataset(Path(plan.data))
    if all(len(question.gold) == 1 for question in data.questions):
        found = (_fewer(question, plan) for question in data.questions)
    else:
        found = _written(data, plan)
    unique = {question.question: question for question in found if question is not None}
    return balanced(unique.values())[: plan.candidates]


def balanced(questions: Iterable[EvalQuestion]) -> list[EvalQuestion]:
    """Return the questions in an order in which the kinds take turns."""
    by_kind: dict[str, list[EvalQuestion]] = {}
    for question in questions:
        by_kind.setdefault(question.kind, []).append(question)
    turns = chain.from_iterable(zip_longest(*by_kind.values()))
    return [question for question in turns if question is not None]


def _fewer(question: EvalQuestion, plan: SingleHopPlan) -> EvalQuestion | None:
    """Return the question over its gold passage and others that do not hold the answer."""
    (gold,) = question.gold
    others = [p for p in question.passages if not holds_answer(p.text, question.answers)]
    kept = {gold, *others[: plan.passages - 1]}
    if len(kept) < plan.passages:
        return None
    passages = tuple(passage for passage in question.passages if passage in kept)
    used = {passage.document_id for passage in passages}
    documents = tuple(d for d in question.documents if d.document_id in used)
    return replace(question, passages=passages, documents=documents)


def _written(data: EvalDataset, plan: SingleHopPlan) -> Iterable[EvalQuestion | None]:
    rng = random.Random(plan.seed)
    for index, source in enumerate(data.questions):
        paragraphs = paragraphs_of(passage.text for passage in source.passages)
        for written in write_questions(paragraphs):
            yield _with_distractors(written, paragraphs, plan, f"{index}", rng)


def _with_distractors(
    written: WrittenQuestion,
    paragraphs: Sequence[str],
    plan: SingleHopPlan,
    name: str,
    rng: random.Random,
) -> EvalQuestion | None:
    """Return the question over its paragraph and others, None if the answer is not in one only."""
    told = normalize_answer(written.answer), normalize_answer(written.subject)
    others = [
        text
        for text in paragraphs
        if text != written.paragraph and not any(one in normalize_answer(text) for one in told)
    ]
    if len(others) < plan.passages - 1:
        return None
    texts = [written.paragraph, *rng.sample(others, plan.passages - 1)]
    rng.shuffle(texts)
    names = [] if written.answer[:1].isdigit() else [written.answer]
    documents = [
        Document(f"{name}-{paragraphs.index(text)}", (with_capitals(text, names),))
        for text in texts
    ]
    gold = [texts.index(written.paragraph)]
    return over_passages(written.question, (written.answer,), documents, gold, written.kind)


class _Asker:
    """Answers by full prefill, with the prompt rendered by the model's chat template."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompt = RagPrompt(engine.tokenizer, INSTRUCTION)
        self._sampling = SamplingParams.greedy(max_tokens=24, stop=("\n", *self._prompt.stop))

    def tried(self, question: EvalQuestion, least_f1: float) -> _Tried:
        """Return the scores in the three ways, or in the first if it is below ``least_f1``."""
        distractors = tuple(p for p in question.passages if p not in question.gold)
        ways = {"passages": question.passages, "none": (), "distractors": distractors}
        found = _Tried(question, {}, {})
        for way, passages in ways.items():
            answer = self._answer(question.question, [passage.text for passage in passages])
            found.f1[way] = token_f1(answer, question.answers)
            found.exact[way] = exact_match(answer, question.answers)
            if found.f1["passages"] < least_f1:
                break
        return found

    def _answer(self, question: str, passages: Sequence[str]) -> str:
        text = self._prompt.render([Turn(question, tuple(passages))])
        prompt = replace(BlendPrompt.of(text), is_rendered=True)
        return self._engine.generate_full(prompt, self._sampling).text


def _row(name: str, tried: Sequence[_Tried]) -> dict[str, Any]:
    """Return mean scores in the ways in which all of the questions were asked."""
    ways = [way for way in ("passages", "none", "distractors") if all(way in t.f1 for t in tried)]
    means = {
        f"{score}_{way}": mean(getattr(one, score)[way] for one in tried)
        for score in ("f1", "exact")
        for way in ways
        if tried
    }
    return {"questions": name, "count": len(tried), **means}


def show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        output.print_facts(f"{row.pop('questions')}, {found['model']}", row)


app = benchmark_app(SingleHopPlan, measure_single_hop, show)

if __name__ == "__main__":
    app()
