"""``cacheblend-rag demo``: one collection, one set of questions, four ways to answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cacheblend_rag.cli import models, output
from cacheblend_rag.config import LeadIn
from cacheblend_rag.engines.naming import DEMO_MODEL
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import StoreError
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.retrieval import BUNDLED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cacheblend_rag.bench.ttft import TtftRow
    from cacheblend_rag.engines.base import Generation
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.quality.dataset import EvalQuestion
    from cacheblend_rag.report import BlendReport
    from cacheblend_rag.text.chunk import Document

DOCUMENTS = 24
QUESTIONS = 8
RETRIEVED = 5
SEED = 11
MAX_ANSWER_TOKENS = 16
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class _Method:
    """A column of the demo: full prefill when ``lead_in`` is None, else a rule."""

    name: str
    label: str
    lead_in: LeadIn | None
    selector: str = "none"
    ratio: float = 0.0


METHODS = (
    _Method("full", "full prefill", None),
    _Method("reuse", "plain reuse", "instruction"),
    _Method("blend", "blend", "instruction", "prior", 0.2),
    _Method("contextual", "contextual", "document"),
)


@dataclass(frozen=True)
class _Answer:
    text: str
    correct: bool
    report: BlendReport

    @property
    def first_token_seconds(self) -> float:
        return self.report.seconds.time_to_first_token

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "correct": self.correct,
            "reused_tokens": self.report.reused_tokens,
            "recomputed_tokens": self.report.recomputed_tokens,
            "ttft_seconds": self.first_token_seconds,
        }


@dataclass(frozen=True)
class _Answered:
    """One question and each method's answer, by the method's name."""

    question: EvalQuestion
    prompt_tokens: int
    answers: dict[str, _Answer]

    def to_dict(self) -> dict[str, Any]:
        return {
            "question": self.question.question,
            "gold": self.question.answers[0],
            "documents": [document.document_id for document in self.question.documents],
            "prompt_tokens": self.prompt_tokens,
            "answers": {name: answer.to_dict() for name, answer in self.answers.items()},
        }


@dataclass(frozen=True)
class _Summary:
    """One method over all questions; TTFT is the median, tokens are means a question.

    Tokens are told apart as in BlendReport: reused, recomputed, computed (had no cached KV).
    """

    method: _Method
    correct: int
    reused_tokens: float
    recomputed_tokens: float
    computed_tokens: float
    ttft_seconds: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
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
class _Demo:
    engines: dict[LeadIn, TransformersEngine]
    instruction: str
    questions: tuple[EvalQuestion, ...]

    def index(self, documents: Sequence[Document]) -> int:
        """Precompute the collection once a lead-in; returns how many chunks."""
        reports = [engine.precompute(documents) for engine in self.engines.values()]
        return reports[0].computed + reports[0].skipped

    def answer_all(self) -> Iterator[_Answered]:
        """Answer every question by every method, after one untimed answer by each."""
        for method in METHODS:
            self._generate(self.questions[0], method)
        for question in self.questions:
            answers = {m.name: self._answer(question, m) for m in METHODS}
            prompt_tokens = next(iter(answers.values())).report.prompt_tokens
            yield _Answered(question, prompt_tokens, answers)

    def _answer(self, question: EvalQuestion, method: _Method) -> _Answer:
        from cacheblend_rag.quality.metrics import exact_match

        generation = self._generate(question, method)
        correct = bool(exact_match(generation.text, question.answers))
        return _Answer(generation.text.strip(), correct, generation.report)

    def _generate(self, question: EvalQuestion, method: _Method) -> Generation:
        from cacheblend_rag.engines.base import SamplingParams

        prompt = question.prompt(self.instruction)
        sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, stop=("\n",))
        if method.lead_in is None:
            return next(iter(self.engines.values())).generate_full(prompt, sampling)
        engine = self.engines[method.lead_in]
        config = engine.config.with_changes(
            selector=method.selector, recompute_ratio=method.ratio, min_tokens=0
        )
        return engine.generate(prompt, sampling, config=config)


def demo_command(
    questions: Annotated[int, typer.Option(min=1, max=40, help="How many questions.")] = QUESTIONS,
    embedding_model: Annotated[
        str, typer.Option(help="'bundled' or any sentence-transformers name or folder.")
    ] = BUNDLED,
    real_size: Annotated[
        bool, typer.Option(help="End with the same blend on a model of real size.")
    ] = True,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only write the demo's documents, as text files."),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Retrieve, answer by full prefill, plain reuse and blend side by side, and compare."""
    if save is not None:
        _save_documents(save, questions)
        return
    checks.check_embedding_model(embedding_model)
    checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", "demo")
    console = output.side_console() if as_json else output.result_console()
    with output.stdout_reserved(as_json):
        demo, documents = _set_up(questions, embedding_model)
        chunks = demo.index(documents)
        console.print(f"Indexed {len(documents)} documents, {chunks} chunks, once.")
        answered = []
        for found in demo.answer_all():
            answered.append(found)
            _print_answered(console, found)
        summaries = [_summarize(method, answered) for method in METHODS]
        _print_tables(console, answered, summaries)
        real = _measure_real_size() if real_size else None
    if real:
        console.print(_real_size_line(real), soft_wrap=True)
    if as_json:
        output.print_json(
            {
                "questions": [found.to_dict() for found in answered],
                "methods": [summary.to_dict() for summary in summaries],
                "real_size": real and real.to_dict(),
            }
        )


def _save_documents(folder: Path, questions: int) -> None:
    """Write a file a document into a new folder, and say what can be asked of them."""
    from cacheblend_rag.demo.corpus import generate_collection

    collection, drawn = generate_collection(DOCUMENTS, questions, SEED)
    try:
        folder.mkdir(parents=True)
        for document in collection:
            (folder / f"{document.document_id}.txt").write_text(f"{document.text}\n")
    except OSError as error:
        raise StoreError(f"--save {folder} cannot be made: {error.strerror}") from error
    typer.echo(f"{folder}: {len(collection)} notes about made-up people and companies; ask")
    for item in drawn:
        typer.echo(f"  {item.question}  ({item.answer})")


def _set_up(questions: int, embedding_model: str) -> tuple[_Demo, list[Document]]:
    """Draw the collection, retrieve for each question, and load the demo model."""
    from cacheblend_rag.demo.corpus import CHUNK_SEPARATOR, INSTRUCTION, generate_collection
    from cacheblend_rag.quality.dataset import EvalQuestion, lead_text
    from cacheblend_rag.rag.retrieval import DocumentRetriever
    from cacheblend_rag.text.chunk import Document

    quiet_libraries()
    collection, drawn = generate_collection(DOCUMENTS, questions, SEED)
    documents = [Document(d.document_id, d.chunks, CHUNK_SEPARATOR) for d in collection]
    retriever = DocumentRetriever(documents, embedding_model)
    asked = []
    for item in drawn:
        found = tuple(retriever.retrieve(item.question, RETRIEVED))
        passages = tuple(chunk for document in found for chunk in document.to_chunks())
        asked.append(EvalQuestion(item.question, (item.answer,), passages, found, kind=item.kind))
    lead_ins = list(dict.fromkeys(m.lead_in for m in METHODS if m.lead_in is not None))
    engines = models.open_engines(DEMO_MODEL, lead_ins, instruction=lead_text(INSTRUCTION))
    return _Demo(engines, INSTRUCTION, tuple(asked)), documents


def _summarize(method: _Method, answered: Sequence[_Answered]) -> _Summary:
    answers = [found.answers[method.name] for found in answered]
    full = median(found.answers["full"].first_token_seconds for found in answered)
    seconds = median(answer.first_token_seconds for answer in answers)
    return _Summary(
        method=method,
        correct=sum(answer.correct for answer in answers),
        reused_tokens=mean(answer.report.reused_tokens for answer in answers),
        recomputed_tokens=mean(answer.report.recomputed_tokens for answer in answers),
        computed_tokens=mean(answer.report.computed_tokens for answer in answers),
        ttft_seconds=seconds,
        speedup=full / seconds,
    )


def _print_answered(console: Console, found: _Answered) -> None:
    console.print(f"\n[bold]{escape(found.question.question)}[/bold]", soft_wrap=True)
    for method in METHODS:
        answer = found.answers[method.name]
        console.print(
            f"  {method.label:<13}{_marked(answer)}  {output.duration(answer.first_token_seconds)}",
            soft_wrap=True,
        )


def _marked(answer: _Answer) -> str:
    text = escape(shorten(answer.text, SHOWN_CHARACTERS) or "(nothing)")
    return f"[green]{text}[/green]" if answer.correct else f"[red]{text} *[/red]"


def _print_tables(
    console: Console, answered: Sequence[_Answered], summaries: Sequence[_Summary]
) -> None:
    answers = _table("Answers (* wrong)")
    for heading in ("question", "gold", *(method.label for method in METHODS)):
        answers.add_column(heading)
    for found in answered:
        cells = [_marked(found.answers[method.name]) for method in METHODS]
        question = found.question
        answers.add_row(escape(question.question), escape(question.answers[0]), *cells)
    totals = _table("Cost (tokens: mean a question; first token: median)")
    totals.add_column("method", no_wrap=True)
    for heading in ("correct", "reused", "recomputed", "computed", "first token", "sooner"):
        totals.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        totals.add_row(
            summary.method.label,
            f"{summary.correct} of {len(answered)}",
            f"{summary.reused_tokens:,.0f}",
            f"{summary.recomputed_tokens:,.0f}",
            f"{summary.computed_tokens:,.0f}",
            output.duration(summary.ttft_seconds),
            f"{summary.speedup:.1f}x",
        )
    for table in (answers, totals):
        console.print()
        console.print(table)
    console.print()


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")


def _measure_real_size() -> TtftRow:
    """Time the demo's blend on random weights of a real model's shape."""
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.bench.ttft import TtftPlan, measure_ttft

    blend = next(method for method in METHODS if method.name == "blend")
    plan = TtftPlan(
        shape=named_shape("smollm2-135m"),
        ratios=(blend.ratio,),
        tiers=("host",),
        selector=blend.selector,
        repeat=1,
        memory=False,
    )
    with output.side_console().status("a model of real size") as status:
        (row,) = measure_ttft(plan, lambda step: status.update(f"a model of real size: {step}"))
    return row


def _real_size_line(row: TtftRow) -> str:
    return (
        f"On a model of real size ({row.shape} shape, {row.prompt_tokens:,} tokens): "
        f"full prefill {output.duration(row.full_seconds)}, "
        f"blend {output.duration(row.blend_seconds)}, {row.speedup:.1f}x sooner."
    )
