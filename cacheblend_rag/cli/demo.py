"""``cacheblend-rag demo``: the toy model on constructed questions, a real one on real passages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli import demo_passages, demo_toy, options, output
from cacheblend_rag.demo.notes import draw_notes
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.retrieval import BUNDLED

QUESTIONS = 8


def demo_command(
    *,
    questions: Annotated[
        int, typer.Option(min=1, max=40, help="How many questions the toy model is asked.")
    ] = QUESTIONS,
    model: Annotated[
        str, typer.Option(help="The model for the real passages: a name, file or folder.")
    ] = DEFAULT_MODEL,
    embedding_model: Annotated[
        str, typer.Option(help="'bundled' or any sentence-transformers name or folder.")
    ] = BUNDLED,
    toy_only: Annotated[
        bool, typer.Option("--toy-only", help="Skip the real passages and their model.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only write the toy's notes, as text files."),
    ] = None,
    save_passages: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only write the real passages, as text files."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Answer by full prefill and with reused KV, side by side: with a toy, then a real model."""
    if save is not None and save_passages is not None:
        raise ConfigError("--save and --save-passages: give one of them")
    if save is not None:
        _save_notes(save, questions)
        return
    if save_passages is not None:
        _save_passages(save_passages)
        return
    checks.check_embedding_model(embedding_model)
    checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", "demo")
    if not toy_only:
        checks.check_model(model)
    console = output.side_console() if as_json else output.result_console()
    with output.stdout_reserved(as_json):
        quiet_libraries()
        toy = demo_toy.show(console, questions, embedding_model)
        real = None if toy_only else demo_passages.show(console, model, embedding_model)
    if as_json:
        output.print_json({**toy, "real": real})


def _save_notes(folder: Path, questions: int) -> None:
    """Write the toy's notes, and print how to ask about them."""
    notes = draw_notes(questions)
    try:
        notes.save(folder)
    except OSError as error:
        raise StoreError(f"--save {folder} cannot be created: {error.strerror}") from error
    typer.echo(f"{folder}: {len(notes.documents)} notes about made-up people and companies; ask")
    for item in notes.questions:
        typer.echo(f"  {item.question}  ({item.answer})")
    typer.echo(f"the toy model reads them: cacheblend-rag index {folder} --model demo")


def _save_passages(folder: Path) -> None:
    """Write the real passages, and print how to ask about them."""
    sample = load_passages()
    try:
        sample.save(folder)
    except OSError as error:
        raise StoreError(f"--save-passages {folder} cannot be created: {error.strerror}") from error
    typer.echo(f"{folder}: {len(sample.passages)} passages of MuSiQue (NOTICE: CC BY 4.0); ask")
    for item in sample.questions:
        typer.echo(f"  {item.question}  ({item.answers[0]})")
    typer.echo(f"to begin: cacheblend-rag index {folder}")
