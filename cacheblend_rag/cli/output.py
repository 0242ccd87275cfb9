"""Prints results to stdout and everything else (progress, warnings, errors) to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from cacheblend_rag import progress
from cacheblend_rag.printable import one_line as one_line  # noqa: PLC0414 - commands' name for it
from cacheblend_rag.printable import printable as printable  # noqa: PLC0414 - as above
from cacheblend_rag.progress import ProgressCallbacks

STDOUT, STDERR = 1, 2
INTERRUPTED = 130
"""Exit code of a command that was stopped by Ctrl-C, as shells have it."""
LINE_SECONDS = 15.0
NAME_CELLS, BAR_CELLS = 30, 20
PADDING = 2


def result_console() -> Console:
    """Return the console that results are printed on."""
    return Console()


def side_console() -> Console:
    """Return the console for progress and messages."""
    return Console(stderr=True)


def warn(message: str) -> None:
    """Print one line of warning."""
    told = f"warning: {one_line(message)}"
    side_console().print(told, style="yellow", markup=False, soft_wrap=True)


def say(message: str) -> None:
    """Print one line on stderr."""
    side_console().print(one_line(message), markup=False, soft_wrap=True, highlight=False)


def tell(message: str) -> None:
    """Print why a command fails, as one line on stderr."""
    sys.stderr.write(f"cacheblend-rag: {one_line(message)}\n")


def print_json(plain: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own; NaN and infinity raise ValueError."""
    sys.stdout.write(json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def stdout_reserved(reserved: bool) -> Iterator[None]:
    """Redirect stdout of libraries and their subprocesses to stderr while ``reserved``."""
    if not reserved:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


@contextlib.contextmanager
def progress_bar(*, lines: bool = False) -> Iterator[ProgressCallbacks]:
    """Yield a progress display on stderr that disappears at the end.

    lines: without a terminal, print progress as a line every LINE_SECONDS; else nothing.
    """
    console = side_console()
    columns = (
        TextColumn(
            "{task.description}", markup=False, table_column=_one_line(max_width=NAME_CELLS)
        ),
        BarColumn(bar_width=BAR_CELLS),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False, table_column=_one_line(ratio=1)),
    )
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable, expand=True) as drawn:
        told = _told_in_lines(drawn) if lines and disable else contextlib.nullcontext()
        bar = _ProgressBar(drawn)
        shown = progress.shown_by(bar) if lines or not disable else contextlib.nullcontext()
        with told, shown:
            yield bar


@contextlib.contextmanager
def _told_in_lines(progress: Progress) -> Iterator[None]:
    """Print all tasks as one line at intervals, for logs."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(LINE_SECONDS):
            if told := "; ".join(map(_line, progress.tasks)):
                sys.stderr.write(f"{one_line(told)}\n")
                sys.stderr.flush()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _line(task: Task) -> str:
    count = f" {task.completed:.0f}/{task.total:.0f}" if task.total else ""
    note = task.fields["note"]
    return f"{task.description}{count}{f', {note}' if note else ''}"


def _one_line(**options: Any) -> Column:
    """Return a column that truncates long text instead of wrapping it."""
    return Column(no_wrap=True, overflow="ellipsis", **options)


class _ProgressBar(ProgressCallbacks):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def warn(self, message: str) -> None:
        warn(message)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        task = self._progress.add_task(one_line(name), total=None, note="")
        try:
            with super().phase(name):
                yield
        finally:
            self._progress.remove_task(task)

    def begin(self, name: str, steps: int) -> progress.Task:
        return _Bar(self._progress, self._progress.add_task(one_line(name), total=steps, note=""))


class _Bar(progress.Task):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def note(self, what: str) -> None:
        self._progress.update(self._task, note=one_line(what))

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)

    def end(self) -> None:
        self._progress.remove_task(self._task)


def percent(share: float) -> str:
    """Return a share from 0 to 1 as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return seconds, or milliseconds below a tenth of a second, with a unit."""
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Return a table without rows: left-aligned columns ``names``, right-aligned ``figures``."""
    made = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for name in names:
        made.add_column(name, no_wrap=True)
    for figure in figures:
        made.add_column(figure, justify="right", no_wrap=True)
    return made


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Print names and values as a two-column table, under a title of one line."""
    table = Table(title=title, show_header=False, box=None, min_width=cell_len(title))
    for name, value in facts.items():
        text = f"{value:,.6g}" if isinstance(value, float) else one_line(str(value))
        table.add_row(escape(name.replace("_", " ")), escape(text))
    result_console().print(table)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as a table that truncates no key and no folder, since users copy them."""
    table = Table(*columns, box=None)
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    for row in texts:
        table.add_row(*map(escape, row))
    console = result_console()
    widest = [max(map(cell_len, column)) + PADDING for column in zip(columns, *texts, strict=True)]
    console.width = max(console.width, 160, sum(widest))
    console.print(table)
