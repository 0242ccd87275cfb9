"""Draws fidelity against compute from what ``cacheblend-rag eval --fidelity --json`` printed.

``python -m tests.benchmarks.fidelity_chart FILE... --out docs/figures/NAME.svg`` draws one panel
for each file and setting: KL to full prefill (logarithmic, mean over prompts, bars: 95 % intervals)
against compute as a share of full prefill's. A line joins the ratios of one lead-in and selector;
the default settings are a point of their own.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLOURS = ("#188038", "#1a73e8", "#e37400", "#9334e6", "#d93025", "#12848b", "#795548")
GREY = "#9aa0a6"
CONTROLS = ("random", "none")
BASELINES = ("full", "prefix_caching")
FLOOR = 1e-8
"""A logarithmic axis has no zero; KL of float32 logits below this is rounding."""
COLUMNS = 2
GAP = 0.064
"""Least distance of two labels, as a share of a panel's height."""

Row = dict[str, Any]
Line = tuple[str, list[Row]]


def chart(runs: Sequence[dict[str, Any]]) -> str:
    """Return the chart as SVG. runs: the JSON objects that ``eval`` printed."""
    panels = [(run, setting) for run in runs for setting in settings_of(run)]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    with mpl.rc_context({"svg.hashsalt": "cacheblend-rag", "font.size": 9}):
        figure = Figure(figsize=(5.2 * columns, 3.8 * lines), layout="constrained")
        places = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, (run, setting) in zip(places, panels, strict=False):
            _draw(axes, run, setting)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def settings_of(run: dict[str, Any]) -> list[str]:
    """Return a run's settings in which fidelity was measured, in order."""
    return list(dict.fromkeys(row["setting"] for row in run["rows"] if "kl" in row))


def lines_of(run: dict[str, Any], setting: str) -> list[Line]:
    """Return a setting's lines by name, each from the least compute to the most."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in run["rows"]:
        if row["setting"] == setting and "kl" in row and row["selector"] not in BASELINES:
            found[_name(row)].append(row)
    return [(name, sorted(rows, key=_compute)) for name, rows in found.items()]


def _name(row: Row) -> str:
    if row["selector"] == "no_context":
        return "no passages"
    if row["default"]:
        return f"default ({row['lead_in']}, {row['selector']})"
    return f"{row['lead_in']}, {row['selector']}"


def _compute(row: Row) -> float:
    return float(row["compute_share"])


def _draw(axes: Axes, run: dict[str, Any], setting: str) -> None:
    lines = lines_of(run, setting)
    chosen = [n for n, rows in lines if rows[0]["selector"] not in (*CONTROLS, "no_context")]
    colours = dict(zip(chosen, COLOURS * len(chosen), strict=False))
    labels = []
    for name, rows in lines:
        x, y = [_compute(row) for row in rows], [max(row["kl"], FLOOR) for row in rows]
        ends = [(max(low, FLOOR), high) for low, high in (row["kl_ci95"] for row in rows)]
        bars = [
            [v - min(low, v) for v, (low, _) in zip(y, ends, strict=True)],
            [max(high, v) - v for v, (_, high) in zip(y, ends, strict=True)],
        ]
        style = ":" if rows[0]["lead_in"] == "instruction" else "-"
        colour = colours.get(name, GREY)
        axes.errorbar(
            x, y, yerr=bars, color=colour, ls=style, marker="o", ms=3, lw=1.2, elinewidth=0.6
        )
        marked = [(row, at) for row, at in zip(rows, y, strict=True) if row["default"]]
        for row, at in marked:
            axes.plot(_compute(row), at, marker="o", ms=8, mfc="none", mec=colour)
        labels.append((y[-1], x[-1], name, colour))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, 1.05 * max(x for _, x, _, _ in labels))
    _label(axes, labels)
    model, dtype, questions = run["model"], run["dtype"], run["prompts"][setting]
    axes.set_title(f"{model} ({dtype}), {setting}, {questions} prompts", loc="left")
    axes.set_xlabel("compute, share of full prefill")
    axes.set_ylabel("KL to full prefill, nats")
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Write names in a column right of all points, apart from each other, a thin line to each."""
    axes.get_figure().draw_without_rendering()  # type: ignore[union-attr]
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(labels)
    wanted = [float(to_axes.transform((x, y))[1]) for y, x, _, _ in labels]
    for (y, x, name, colour), height in zip(labels, _apart(wanted), strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.4, "alpha": 0.6},
        )


def _apart(heights: Sequence[float], gap: float = GAP, top: float = 1.0) -> list[float]:
    """Return rising heights at least ``gap`` apart, moved down from ``top`` where needed."""
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + gap) if found else height)
    limit = top
    for index in reversed(range(len(found))):
        found[index] = min(found[index], limit)
        limit = found[index] - gap
    return found


def main() -> None:
    """Draw the figures of the given files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.write_text(chart([json.loads(path.read_text()) for path in given.files]))


if __name__ == "__main__":
    main()
