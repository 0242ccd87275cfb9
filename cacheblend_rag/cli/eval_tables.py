"""The tables that ``cacheblend-rag eval`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheblend_rag.cli import output

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend_rag.quality.dataset import EvalDataset
    from cacheblend_rag.quality.summary import EvalRow, FidelityRow

SCORES = ("ratio", "exact", "95 %", "F1", "Rouge-L", "recomputed", "compute")
FIDELITY = ("ratio", "compute", "first KL", "KL", "95 %", "top-1", "same", "gold", "recovered")
TTFT = ("ratio", "compute", "exact", "holds", "first token", "sooner", "95 %")
WIDE = 110
"""Least width of tables that truncate nothing."""
DEFAULT_MARK = "*"


def print_tables(data: EvalDataset, rows: Sequence[EvalRow]) -> None:
    """Print each setting's scores and, if they were measured, its fidelity and times."""
    console = output.result_console()
    for setting in data.settings:
        own = [row for row in rows if row.setting == setting]
        title = f"{data.name}, {setting}: {len(data.of_setting(setting))} questions"
        tables = [_scores(f"{title}, all in % ({DEFAULT_MARK} engine's default)", own)]
        if any(row.fidelity for row in own):
            tables.append(_fidelity(f"{title}, fidelity to full prefill", own))
        if any(row.ttft for row in own):
            tables.append(_times(f"{title}, time to first token", own))
        for table in tables:
            console.width = console.width if table is tables[0] else max(console.width, WIDE)
            console.print(table)
            console.print()


def _table(title: str, headings: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for heading in ("lead-in", "selector"):
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _scores(title: str, rows: Sequence[EvalRow]) -> Table:
    table = _table(title, SCORES)
    for row in rows:
        interval = f"{100 * row.ci95[0]:.0f}-{100 * row.ci95[1]:.0f}"
        scores = (row.f1, row.rouge_l, row.recomputed_share, row.compute_share)
        exact, *shares = (f"{100 * share:.1f}" for share in (row.exact_match, *scores))
        table.add_row(*_name(row), exact, interval, *shares)
    return table


def _times(title: str, rows: Sequence[EvalRow]) -> Table:
    table = _table(title, TTFT)
    for row in rows:
        if row.ttft:
            low, high = row.ttft.ttft_speedup_ci95 or (row.ttft.ttft_speedup,) * 2
            table.add_row(
                *_name(row),
                f"{row.compute_share:.3f}",
                f"{row.exact_match:.3f}",
                f"{row.holds_answer:.3f}",
                output.duration(row.ttft.ttft_seconds),
                f"{row.ttft.ttft_speedup:.2f}x",
                f"{low:.2f}-{high:.2f}",
            )
    return table


def _fidelity(title: str, rows: Sequence[EvalRow]) -> Table:
    table = _table(title, FIDELITY)
    for row in rows:
        if row.fidelity:
            table.add_row(*_name(row), f"{row.compute_share:.3f}", *_figures(row.fidelity))
    return table


def _figures(found: FidelityRow) -> tuple[str, ...]:
    low, high = found.kl_ci95
    change, recovered = found.gold_logprob_change, found.recovered_kl
    return (
        f"{found.kl_first:.4f}",
        f"{found.kl:.4f}",
        f"{low:.4f}-{high:.4f}",
        f"{found.top1:.3f}",
        f"{found.same_answer:.2f}",
        "" if change is None else f"{change:+.2f}",
        "" if recovered is None else f"{recovered:.3f}",
    )


def _name(row: EvalRow) -> tuple[str, str, str]:
    mark = DEFAULT_MARK if row.default else ""
    return row.lead_in, f"{row.selector}{mark}", f"{100 * row.ratio:g}"
