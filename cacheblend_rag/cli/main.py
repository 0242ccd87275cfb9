"""The entry point of the command line: sub-commands, ``--version``, logging, one-line errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cacheblend_rag.cli import output
from cacheblend_rag.cli.commands import Commands
from cacheblend_rag.errors import CacheBlendError

FAILURE = 2


_UsageError: Any = typer.BadParameter.__base__
"""Click's error class, which Typer vendors under another name."""
_HELP_INSTEAD = "NoArgsIsHelpError"


class _Commands(TyperGroup):
    """Prints usage errors and this package's errors as one line, with exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with errors_in_one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with errors_in_one_line():
            return super().invoke(ctx)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print usage errors and this package's errors as one line, and exit with code 2."""
    try:
        yield
    except CacheBlendError as error:
        output.tell(str(error))
        raise typer.Exit(FAILURE) from error
    except _UsageError as error:
        if type(error).__name__ == _HELP_INSTEAD:
            raise
        output.tell(_usage_line(error))
        raise typer.Exit(FAILURE) from error


def _usage_line(error: Any) -> str:
    """Return Typer's usage error in this package's style, with the command that prints help."""
    said = error.format_message().rstrip(".")
    help_at = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
    return f"{said[:1].lower()}{said[1:]}{help_at}"


app = typer.Typer(
    cls=_Commands,
    name="cacheblend-rag",
    help="Reuse retrieved passages' KV caches and answer sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("cacheblend-rag"))
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log to stderr; twice for more.")
    ] = 0,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("cacheblend_rag").setLevel(level)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
