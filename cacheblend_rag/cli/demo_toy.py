"""The demo's first part: the bundled toy model answers constructed questions in four ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from cacheblend_rag.cli import output
from cacheblend_rag.demo.corpus import INSTRUCTION
from cacheblend_rag.demo.notes import draw_notes
from cacheblend_rag.models import DEMO_MODEL
from cacheblend_rag.quality.dataset import lead_text
from cacheblend_rag.quality.methods import METHODS, needed_lead_ins
from cacheblend_rag.quality.questions import demo_documents
from cacheblend_rag.rag.retrieval import DocumentRetriever
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from rich.console import Console

    from cacheblend_rag.quality.comparison import Answer, Comparison, SettingAnswers, Summary

COLUMN = 14
TITLE = (
    "[bold]demo: a toy model of 1.1M parameters[/bold], whose questions need information from "
    "other passages (* wrong answer).\nThey show what plain reuse loses and other methods keep; "
    "times of so small a model mean little."
)


def show(console: Console, questions: int, embedding_model: str) -> dict[str, Any]:
    """Answer by every method and print one table; return plain JSON values."""
    from cacheblend_rag.quality.comparison import summarize

    with output.progress_bar() as bar, _set_up(questions, embedding_model) as comparison:
        with bar.phase("computing the notes' KV"):
            chunks = comparison.index()
        answered = []
        task = bar.begin("questions to the toy", questions)
        for found in comparison.answer_all():
            answered.append(found)
            task.advance()
        task.end()
    summaries = [summarize(method, answered) for method in METHODS]
    console.print(TITLE, soft_wrap=True)
    console.print(f"Indexed {len(comparison.documents)} notes, {chunks} chunks, once.\n")
    for line in _table(answered, summaries):
        console.print(line, soft_wrap=True)
    return {
        "questions": [found.to_dict() for found in answered],
        "methods": [summary.to_dict() for summary in summaries],
    }


@contextmanager
def _set_up(questions: int, embedding_model: str) -> Iterator[Comparison]:
    """Draw the documents, retrieve for each question, and load the toy model."""
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


def _table(answered: Sequence[SettingAnswers], summaries: Sequence[Summary]) -> list[str]:
    """Return lines of answers, then each method's totals; the last column holds the questions."""
    rows = [[(method.label, "bold") for method in METHODS]]
    rows += [[_shown(found.answers[method.name]) for method in METHODS] for found in answered]
    sums = {
        "right": [f"{summary.correct} of {len(answered)}" for summary in summaries],
        "tokens reused, mean": [f"{summary.reused_tokens:,.0f}" for summary in summaries],
        "first token, median": [output.duration(summary.ttft_seconds) for summary in summaries],
    }
    rows += [[(text, "bold") for text in texts] for texts in sums.values()]
    names = ["", *(found.question.question for found in answered), *sums]
    return [_line(cells, name) for cells, name in zip(rows, names, strict=True)]


def _line(cells: Sequence[tuple[str, str]], name: str) -> str:
    texts = [f"[{style}]{escape(text.ljust(COLUMN))}[/{style}]" for text, style in cells]
    return f"  {''.join(texts)}{escape(name)}"


def _shown(answer: Answer) -> tuple[str, str]:
    """Return an answer cut to its column's width, and its colour."""
    text = shorten(answer.text, COLUMN - 3, placeholder="...") or "(nothing)"
    return (text, "green") if answer.correct else (f"{text} *", "red")
