"""The tables that ``cacheblend-rag bench gpu`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from cacheblend_rag.cli import output

FAILED = "failed"
LONGEST = 60
"""Characters of a cell; the JSON has them all."""


def print_gpu(found: Mapping[str, Any]) -> None:
    """Print the results of `measure_gpu`: a table for each step, or why there is none."""
    console = output.result_console()
    shape = f"{found['shape']} in {found['dtype']} on {found['device']}"
    console.print(f"{shape}, {found['seconds']:.0f} s", highlight=False)
    for name, step in found["steps"].items():
        title = f"{name}: {step['about']}: {_ended(step)}"
        console.print(f"\n{escape(title)}", style="bold", highlight=False, soft_wrap=True)
        if step["rows"]:
            _print_rows(step["rows"])
        if step.get("output"):
            console.print(step["output"], markup=False, highlight=False, style="dim")


def _ended(step: Mapping[str, Any]) -> str:
    """Return how a step ended."""
    if step["status"] == "done":
        return f"{step['seconds']:.1f} s"
    if step["status"] == "skipped":
        return str(step["reason"])
    return f"{step['status']} after {step['seconds']:.1f} s: {step['reason']}"


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a column for each figure, wide enough for all; single runs are only in the JSON."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    width = 0
    for name in _names(rows):
        cells = [_cell(row.get(name)) for row in rows]
        heading = (name[:-3] + " ms" if name.endswith("_ms") else name).replace("_", " ")
        is_number = any(_is_number(row.get(name)) for row in rows)
        table.add_column(escape(heading), justify="right" if is_number else "left", no_wrap=True)
        width += 1 + max(map(cell_len, [heading, *cells]))
    for row in rows:
        table.add_row(*(escape(_cell(row.get(name))) for name in _names(rows)))
    console = output.result_console()
    console.width = max(console.width, width)
    console.print(table)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all rows' values, in order; why a case failed comes last."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if not isinstance(value, list)
    )
    names.pop("output", None)
    return sorted(names, key=lambda name: name == FAILED)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else output.printable(str(value))[:LONGEST]
