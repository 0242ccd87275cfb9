"""``cacheblend-rag demo``: one collection, one set of questions, four ways to answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cacheblend_rag.cli import options, output
from cacheblend_rag.config import EMBEDDED
from cacheblend_rag.demo.corpus import INSTRUCTION
from cacheblend_rag.demo.notes import draw_notes
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models import DEMO_MODEL
from cacheblend_rag.quality.dataset import lead_text
from cacheblend_rag.quality.methods import METHODS, needed_lead_ins
from cacheblend_rag.quality.questions import demo_documents
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.retrieval import BUNDLED, DocumentRetriever

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cacheblend_rag.bench.ttft import TtftRow
    from cacheblend_rag.quality.comparison import Answer, Answered, Comparison, Summary

QUESTIONS = 8
SHOWN_CHARACTERS = 40


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
    as_json: options.JsonOption = False,
) -> None:
    """Retrieve, answer by full prefill, plain reuse and blend side by side, and compare."""
    if save is not None:
        _save_documents(save, questions)
        return
    checks.check_embedding_model(embedding_model)
    checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", "demo")
    console = output.side_console() if as_json else output.result_console()
    with output.stdout_reserved(as_json):
        quiet_libraries()
        from cacheblend_rag.quality.comparison import summarize

        with _set_up(questions, embedding_model) as comparison:
            chunks = comparison.index()
            console.print(f"Indexed {len(comparison.documents)} documents, {chunks} chunks, once.")
            answered = []
            for found in comparison.answer_all():
                answered.append(found)
                _print_answered(console, found)
            summaries = [summarize(method, answered) for method in METHODS]
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
    """Write the documents' files, and say what can be asked of them."""
    notes = draw_notes(questions)
    try:
        notes.save(folder)
    except OSError as error:
        raise StoreError(f"--save {folder} cannot be made: {error.strerror}") from error
    typer.echo(f"{folder}: {len(notes.documents)} notes about made-up people and companies; ask")
    for item in notes.questions:
        typer.echo(f"  {item.question}  ({item.answer})")


@contextmanager
def _set_up(questions: int, embedding_model: str) -> Iterator[Comparison]:
    """Draw the collection, retrieve for each question, and load the demo model."""
    from cacheblend_rag.quality.comparison import Comparison, with_retrieved
    from cacheblend_rag.quality.engines import opened_engines

    notes = draw_notes(questions)
    documents = demo_documents(notes.documents)
    retriever = DocumentRetriever(documents, embedding_model)
    asked = with_retrieved(notes.questions, retriever.retrieve)
    opened = opened_engines(
        EMBEDDED, DEMO_MODEL, needed_lead_ins(), instruction=lead_text(INSTRUCTION)
    )
    with opened as engines:
        yield Comparison(engines, INSTRUCTION, documents, asked)


def _print_answered(console: Console, found: Answered) -> None:
    console.print(f"\n[bold]{escape(found.question.question)}[/bold]", soft_wrap=True)
    for method in METHODS:
        answer = found.answers[method.name]
        console.print(
            f"  {method.label:<13}{_marked(answer)}  {output.duration(answer.first_token_seconds)}",
            soft_wrap=True,
        )


def _marked(answer: Answer) -> str:
    text = escape(shorten(answer.text, SHOWN_CHARACTERS) or "(nothing)")
    return f"[green]{text}[/green]" if answer.correct else f"[red]{text} *[/red]"


def _print_tables(
    console: Console, answered: Sequence[Answered], summaries: Sequence[Summary]
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
