"""``python -m tests.benchmarks.NAME``: benchmarks that the project's developers run."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Any

import typer

from cacheblend_rag.cli.main import errors_in_one_line
from cacheblend_rag.cli.plan_command import Measure, Show, measured, plan_command
from cacheblend_rag.engines.quiet_import import quiet_libraries


def benchmark_app(plan: type[Any], measure: Measure, show: Show) -> typer.Typer:
    """A command line of one command; its options are the plan's fields, and ``--json``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    about = getdoc(plan) or ""
    app.command()(_told(plan_command(plan, lambda *given: measured(measure, show, *given), about)))
    return app


def _told(command: Callable[..., None]) -> Callable[..., None]:
    def run(**values: Any) -> None:
        quiet_libraries()
        with errors_in_one_line():
            command(**values)

    run.__dict__.update(command.__dict__)
    run.__doc__, run.__annotations__ = command.__doc__, command.__annotations__
    return run
