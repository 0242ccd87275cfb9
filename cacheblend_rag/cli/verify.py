"""``cacheblend-rag verify``: the gate before production, on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.models import LOCAL_MODELS
from cacheblend_rag.rag import checks

if TYPE_CHECKING:
    from cacheblend_rag.progress import ProgressCallbacks
    from cacheblend_rag.quality.verify.check import Check, Verdict

MARKS = {"ok": "[green]ok[/green]", "failed": "[red]failed[/red]", "skipped": "skipped"}


def verify_command(
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}, or a hub name.")],
    *,
    dataset: Annotated[
        str | None,
        typer.Option(help="Questions, as for `eval`.", show_default="a packaged set"),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="With --dataset: at most so many.")] = 6,
    profile: options.ProfileOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check a model before it is put into production; exit code 1 if it fails.

    Chat template, tokenizer, positions, exactness at ratio 1, precision, and fidelity on a small
    set, in the embedded engine.
    """
    with output.stdout_reserved(as_json):
        checks.check_model(model)
        checks.check_placement(device, dtype)
        from cacheblend_rag.quality.questions import choose_questions

        data = choose_questions(dataset, (), questions, None, 0) if dataset else None
        with output.progress_bar(lines=True) as progress:
            verdict = verified(
                model, progress, profile=profile, data=data, device=device, dtype=dtype
            )
    if as_json:
        output.print_json(verdict.to_dict())
    else:
        print_verdict(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def verified(model: str, progress: ProgressCallbacks, **settings: Any) -> Verdict:
    """Return the verdict on a model, and show each check; settings: as for verify_model."""
    from cacheblend_rag.quality.verify.gate import verify_model

    task = progress.begin(f"verifying {model}", 0)

    def shown(check: Check) -> None:
        task.note(f"{check.name}: {check.status}")

    verdict = verify_model(model, on_check=shown, **settings)
    task.end()
    return verdict


def print_verdict(verdict: Verdict) -> None:
    """Print a page: a line for each check, one for each remedy, and the verdict."""
    from rich.markup import escape
    from rich.table import Table

    where = f"{verdict.engine} engine, {verdict.dtype} on {verdict.device}"
    table = Table(
        title=escape(f"{verdict.model}: {where}"), show_header=False, box=None, title_justify="left"
    )
    for check in verdict.checks:
        told = output.printable(_told(check))
        table.add_row(check.name, MARKS[check.status], escape(told))
    console = output.result_console()
    console.print(table)
    console.print(escape(verdict.advice), style="bold", soft_wrap=True)


def _told(check: Check) -> str:
    return f"{check.found}. {check.remedy.capitalize()}." if check.remedy else check.found
