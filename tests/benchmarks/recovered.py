"""Draws the quality page's picture and prints its table, from docs/figures/recovered.

``python -m tests.benchmarks.recovered`` writes ``docs/figures/recovered.svg`` and prints the table.
A file there is what ``cacheblend-rag eval --json`` printed for one model and one kind of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.benchmarks.chart import FIGURES, as_svg

CHART = FIGURES / "recovered.svg"
Row = dict[str, Any]
REUSE, HKVD, DEFAULT = "reuse after the document", "hkvd, 15 %", "default"
RULES = {
    "reuse after the instruction": ("#c0504d", "o", ("instruction", "none", 0.0)),
    REUSE: ("#e2a76f", "o", ("document", "none", 0.0)),
    "random tokens, 8 %": ("#9aa0a6", "X", ("document", "random", 0.08)),
    HKVD: ("#4878a8", "s", ("document", "hkvd", 0.15)),
    DEFAULT: ("#188038", "D", DEFAULT),
}
"""How a rule is named, drawn and found."""
HEAD = (
    "| model | prompts | setting | compute | KL | same | log-probability | F1 "
    "| `hkvd` 0.15: compute, KL | reuse: KL | full prefill right |"
)


@dataclass(frozen=True)
class Cell:
    """A model's figures for the prompts of one setting; rules: those in RULES."""

    model: str
    prompts: str
    setting: str
    full: Row
    rules: dict[str, Row]


def cells(figures: Path = FIGURES) -> Iterator[Cell]:
    """Yield the cells of all files, by the files' names."""
    for file in sorted((figures / "recovered").glob("*.json")):
        run = json.loads(file.read_text())
        kind, _, tokens = run["dataset"].rpartition("-")
        for setting, number in run["prompts"].items():
            rows = [row for row in run["rows"] if row["setting"] == setting]
            named = {(row["lead_in"], row["selector"], row["ratio"]): row for row in rows}
            (named[DEFAULT],) = [row for row in rows if row["default"]]
            found = {name: named[key] for name, (_, _, key) in RULES.items()}
            prompts = f"{number} {kind}, {int(tokens):,} tokens"
            yield Cell(run["model"], prompts, setting, named["none", "full", 1.0], found)


def table(figures: Path = FIGURES) -> str:
    """Return the page's table, a line for each cell; a dash if full prefill answers nothing."""
    lines = [HEAD, "| --- " * (HEAD.count("|") - 1) + "|"]
    for cell in cells(figures):
        own, hkvd = cell.rules[DEFAULT], cell.rules[HKVD]
        columns = [
            cell.model,
            cell.prompts,
            cell.setting,
            f"{own['compute_share']:.1%}".replace("%", " %"),
            _told(own, "kl", 3),
            f"{own['same_answer']:.0%}".replace("%", " %"),
            _told(own, "recovered_logprob", 2),
            _told(own, "recovered_f1", 2).partition(" ")[0],
            f"{hkvd['compute_share']:.1%}, {hkvd['kl']:.3f}".replace("%", " %"),
            f"{cell.rules[REUSE]['kl']:.3f}",
            f"{cell.full['holds_answer']:.0%}".replace("%", " %"),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _told(row: Row, name: str, digits: int) -> str:
    if row[name] is None:
        return "-"
    figure, least, most = (f"{one:.{digits}f}" for one in (row[name], *row[f"{name}_ci95"]))
    return f"{figure} ({least} to {most})"


def chart(figures: Path = FIGURES) -> str:
    """Return the picture as SVG: a panel for each cell, compute against divergence."""
    found = list(cells(figures))
    across = min(4, len(found))
    down = -(-len(found) // across)
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(2.9 * across, 2.3 * down + 0.4), layout="constrained")
        panels = list(figure.subplots(down, across, squeeze=False).flat)
        for axes, cell in zip(panels, found, strict=False):
            _draw(axes, cell)
        for axes in panels[len(found) :]:
            axes.remove()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(RULES), frameon=False)
        figure.supylabel("KL divergence from full prefill, nats per token", fontsize=9)
        figure.supxlabel("work, as a share of full prefill's", fontsize=9)
        return as_svg(figure)


def _draw(axes: Axes, cell: Cell) -> None:
    for name, row in cell.rules.items():
        colour, marker, _ = RULES[name]
        size = 60 if name == DEFAULT else 36
        at = row["compute_share"], row["kl"]
        axes.scatter(*at, size, colour, marker=marker, label=name, zorder=3, clip_on=False)
    kind, tokens = cell.prompts.split(", ")
    axes.set_title(f"{cell.model}, {kind}\n{tokens}, {cell.setting}", loc="left", fontsize=8)
    axes.set_xlim(0, 0.25)
    axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1.1 * max(row["kl"] for row in cell.rules.values()))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    CHART.write_text(chart())
    print(table())
