"""``cacheblend-rag explain``: why a prompt was served as it was, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.cli.named_settings import SetOption, engine_options
from cacheblend_rag.cli.one_request import opened_prompt, opened_question
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.rag import DEFAULT_FOLDER
from cacheblend_rag.report import PREFILL_PHASES

if TYPE_CHECKING:
    from cacheblend_rag.observe.explain import Explained


def explain_command(
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="A question to a collection.")
    ] = None,
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="A file that holds a prompt.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page that needs no script and no network."),
    ] = None,
    settings: SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Explain which chunks were reused and why, which tokens were recomputed, and the time it took.

    The prompt is answered once with a trace. With --prompt, --set kv_path=FOLDER names the store of
    chunk KV and the registry of known chunks; model and instruction are those of the application.
    """
    if (question is None) == (prompt is None):
        raise ConfigError("explain: give one of QUESTION and --prompt FILE")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise StoreError(f"--html {html} cannot be written: name a file in an existing folder")
    given = engine_options(settings)
    with output.stdout_reserved(as_json), output.progress_bar() as progress:
        opened = (
            opened_question(folder, question or "", given, progress)
            if prompt is None
            else opened_prompt(prompt, given, progress)
        )
        with opened as asked:
            from cacheblend_rag.observe.explain import explain_prompt

            found = explain_prompt(asked.engine, asked.prompt)
    if html is not None:
        _write_page(found, html)
    if as_json:
        output.print_json(found.to_dict())
        return
    print_explained(found)
    output.say(f"page: {html}" if html else "--html FILE draws tokens, phases and deviations")


def _write_page(found: Explained, html: Path) -> None:
    from cacheblend_rag.observe.explain import explain_page

    try:
        html.write_bytes(explain_page(found).encode("utf-8", "replace"))
    except OSError as error:
        raise StoreError(f"--html {html} cannot be written: {error.strerror}") from error


def print_explained(found: Explained) -> None:
    """Print what became of the prompt and of each chunk; the page draws the rest."""
    told, seconds = found.explanation, found.report.seconds
    phases = [(name.replace("_", " "), getattr(seconds, name)) for name in PREFILL_PHASES]
    spent = ", ".join(f"{name} {output.duration(one)}" for name, one in phases if one > 0)
    lines = [told.summary, f"time to the first token: {spent}"]
    lines += (f"note: {note}" for note in told.notes)
    for line in lines:
        typer.echo(output.printable(line))
    if told.chunks:
        output.print_rows(
            ("#", "document", "at", "tokens", "", "why"),
            [
                (
                    number,
                    one.document_id or one.chunk_id[:12],
                    "-" if one.start < 0 else f"{one.start:,}",
                    f"{one.tokens:,}",
                    "hit" if one.hit else "miss",
                    one.why + (f" [{one.reason_code}]" if one.reason_code else ""),
                )
                for number, one in enumerate(told.chunks, start=1)
            ],
        )
