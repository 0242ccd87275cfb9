"""``cacheblend-rag verify``: the gate before production, on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import named_settings, options, output
from cacheblend_rag.demo.passages import QUESTIONS
from cacheblend_rag.models import LOCAL_MODELS
from cacheblend_rag.rag import checks

if TYPE_CHECKING:
    from cacheblend_rag.quality.verify import Verdict

MARKS = {"ok": "[green]ok[/green]", "failed": "[red]failed[/red]", "skipped": "skipped"}


def verify_command(
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}, or a hub name.")],
    *,
    dataset: Annotated[
        str | None,
        typer.Option(help=f"{QUESTIONS} questions, as for `eval`.", show_default="a packaged set"),
    ] = None,
    settings: named_settings.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check a model before it is put into production; exit code 1 if it fails.

    Chat template, precision, exactness at ratio 1 and of reuse, and fidelity of the settings on
    a small set, in the embedded engine.
    """
    with output.stdout_reserved(as_json):
        checks.check_model(model)
        config = named_settings.engine_config(settings, engine=None, model=None)
        checks.check_placement(config.device, config.dtype)
        from cacheblend_rag.quality.questions import choose_questions
        from cacheblend_rag.quality.verify import verify_model

        data = choose_questions(dataset, QUESTIONS) if dataset else None
        with output.progress_bar(lines=True) as progress:
            task = progress.begin(f"verifying {model}", 0)
            verdict = verify_model(
                model,
                data=data,
                config=config,
                on_check=lambda check: task.note(f"{check.name}: {check.status}"),
            )
            task.end()
    if as_json:
        output.print_json(verdict.to_dict())
    else:
        _print(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def _print(verdict: Verdict) -> None:
    """Print a page: a line for each check, with the remedy of one that failed, and the verdict."""
    from rich.markup import escape
    from rich.table import Table

    where = f"{verdict.engine} engine, {verdict.dtype} on {verdict.device}"
    table = Table(
        title=escape(f"{verdict.model}: {where}"), show_header=False, box=None, title_justify="left"
    )
    for check in verdict.checks:
        remedy = f". {check.remedy.capitalize()}." if check.remedy else ""
        told = output.printable(f"{check.found}{remedy}")
        table.add_row(check.name, MARKS[check.status], escape(told))
    console = output.result_console()
    console.print(table)
    console.print(escape(verdict.advice), style="bold", soft_wrap=True)
