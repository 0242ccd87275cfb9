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
from cacheblend_rag.cli.analyze import analyze_command
from cacheblend_rag.cli.ask import ask_command
from cacheblend_rag.cli.bench import bench_app
from cacheblend_rag.cli.chat import chat_command
from cacheblend_rag.cli.demo import demo_command
from cacheblend_rag.cli.doctor import doctor_command
from cacheblend_rag.cli.eval import evaluate_command
from cacheblend_rag.cli.explain import explain_command
from cacheblend_rag.cli.index import index_command
from cacheblend_rag.cli.models import models_app
from cacheblend_rag.cli.serve import PASS_ON, serve_command
from cacheblend_rag.cli.settings import settings_command
from cacheblend_rag.cli.store import store_app
from cacheblend_rag.cli.tenant import tenant_command
from cacheblend_rag.cli.tune import tune_command
from cacheblend_rag.cli.verify import verify_command
from cacheblend_rag.errors import CacheBlendError

FAILURE = 2


_UsageError: Any = typer.BadParameter.__base__
"""Click's error class, which Typer vendors under another name."""
_HELP_INSTEAD = "NoArgsIsHelpError"


class _Commands(TyperGroup):
    """Prints usage errors and this package's errors as one line, with exit code 2."""

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
app.command("demo")(demo_command)
app.command("index")(index_command)
app.command("ask")(ask_command)
app.command("chat")(chat_command)
app.command("explain")(explain_command)
app.command("analyze")(analyze_command)
app.command("eval")(evaluate_command)
app.command("tune")(tune_command)
app.command("verify")(verify_command)
app.command("serve", context_settings=PASS_ON)(serve_command)
app.command("tenant")(tenant_command)
app.command("doctor")(doctor_command)
app.command("settings")(settings_command)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
app.add_typer(models_app, name="models")


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
