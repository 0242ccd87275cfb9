"""The entry point of the command line: sub-commands, ``--version``, logging, one-line errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from cacheblend_rag.cli import output
from cacheblend_rag.errors import CacheBlendError

FAILURE = 2
PLACES = {
    "demo": "demo.demo_command",
    "index": "index.index_command",
    "ask": "ask.ask_command",
    "explain": "explain.explain_command",
    "eval": "eval.evaluate_command",
    "tune": "tune.tune_command",
    "verify": "verify.verify_command",
    "serve": "serve.serve_command",
    "doctor": "doctor.doctor_command",
    "bench": "bench.bench_app",
    "store": "store.store_app",
    "models": "models.models_app",
}
"""Each command's function, or group of commands, and its module in ``cacheblend_rag.cli``."""
SETTINGS = "PASS_ON"
"""How a module names its command's Click settings, if it has any."""

_UsageError: Any = typer.BadParameter.__base__
"""Click's error class, which Typer vendors under another name."""
_HELP_INSTEAD = "NoArgsIsHelpError"


@cache
def _load(name: str) -> Any:
    """Return Click's command, importing its module."""
    module_name, _, attribute = PLACES[name].partition(".")
    module = import_module(f"cacheblend_rag.cli.{module_name}")
    found, alone = getattr(module, attribute), typer.Typer(rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name, context_settings=getattr(module, SETTINGS, None))(found)
    return get_group(alone).commands[name]


class _Commands(TyperGroup):
    """Loads a command when it is looked up; prints errors as one line, with exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = PLACES

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load(cmd_name) if cmd_name in PLACES else None

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
    rich_markup_mode=None,
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
