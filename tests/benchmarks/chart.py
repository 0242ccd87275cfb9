"""Draws README's chart from the figures committed in docs/figures.

``python -m tests.benchmarks.chart`` writes ``docs/figures/ttft.svg``. The figures are what these
commands printed:

    cd docs/figures
    cacheblend-rag bench ttft random ... --json > ttft.json
    cacheblend-rag bench ttft random --engine vllm ... --json > ttft_vllm.json
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
CHART = FIGURES / "ttft.svg"
ENGINES = {"transformers": "embedded engine", "vllm": "vLLM"}
GREY, GREEN = "#9aa0a6", "#188038"


def chart(figures: Path = FIGURES) -> str:
    """Return the chart as SVG: seconds to the first token, a panel an engine."""
    runs = [json.loads((figures / name).read_text()) for name in ("ttft.json", "ttft_vllm.json")]
    with mpl.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8.4, 2.1), layout="constrained")
        for axes, run in zip(figure.subplots(1, len(runs)), runs, strict=True):
            _draw(axes, run)
        return as_svg(figure)


def as_svg(figure: Figure) -> str:
    """Return a figure as SVG, the same text each time."""
    drawn = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "cacheblend-rag"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def bars(run: dict[str, Any]) -> list[tuple[str, float]]:
    """Return what a benchmark measured, slowest way first: a way's name and its seconds."""
    ways = [
        ("full prefill", run["full_seconds"]),
        ("prefix caching", run.get("prefix_caching_seconds")),
        (f"blend, {run['ratio']:.0%} recomputed", run["blend_seconds"]),
    ]
    return [(name, seconds) for name, seconds in ways if seconds is not None]


def _draw(axes: Axes, run: dict[str, Any]) -> None:
    names, seconds = zip(*bars(run), strict=True)
    colours = [*[GREY] * (len(names) - 1), GREEN]
    drawn = axes.barh(names, seconds, color=colours)
    axes.bar_label(drawn, [_label(value, seconds[0]) for value in seconds], padding=3)
    axes.invert_yaxis()
    axes.set_title(f"{ENGINES[run['engine']]}, {run['prompt_tokens']:,} tokens", loc="left")
    axes.set_xlim(0, max(seconds) * 1.5)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _label(seconds: float, full: float) -> str:
    faster = "" if seconds == full else f"  ({full / seconds:.1f}x sooner)"
    return f"{seconds:.1f} s{faster}"


if __name__ == "__main__":
    CHART.write_text(chart())
