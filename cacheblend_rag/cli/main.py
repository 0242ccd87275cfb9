"""The command line's top: sub-commands, ``--version``, logging, and errors as one line."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cacheblend_rag.cli.ask import ask_command
from cacheblend_rag.cli.bench import bench_app
from cacheblend_rag.cli.chat import chat_command
from cacheblend_rag.cli.demo import demo_command
from cacheblend_rag.cli.doctor import doctor_command
from cacheblend_rag.cli.eval import evaluate_command
from cacheblend_rag.cli.index import index_command
from cacheblend_rag.cli.serve import PASS_ON, serve_command
from cacheblend_rag.cli.store import store_app
from cacheblend_rag.errors import CacheBlendError

FAILURE = 2


class _Commands(TyperGroup):
    """Prints errors that this package raises on purpose as one line, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CacheBlendError as error:
            typer.echo(f"cacheblend-rag: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(FAILURE) from error


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
app.command("eval")(evaluate_command)
app.command("serve", context_settings=PASS_ON)(serve_command)
app.command("doctor")(doctor_command)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")


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
