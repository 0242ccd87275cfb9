"""Draws what candidates keep against what they cost, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cacheblend_rag.quality.tuning.ladder import Standing
from cacheblend_rag.quality.tuning.tune import Tuned

GREY, GREEN, RED, BLUE = "#9aa0a6", "#188038", "#c5221f", "#1a73e8"


def pareto(standings: Sequence[Standing]) -> list[Standing]:
    """Return the candidates that no other one beats in both time and quality, by time."""
    front: list[Standing] = []
    for one in sorted(standings, key=lambda one: (one.ttft_share, -one.kept.quality)):
        if not front or one.kept.quality > front[-1].kept.quality:
            front.append(one)
    return front


def plot(tuned: Tuned, path: Path) -> None:
    """Draw a picture: time to first token across, the share of quality that is kept up.

    Filled points were measured on all prompts, hollow ones were dropped before. Green ones hold the
    bar, which is the red line. Those that no other one beats are joined by a line; they and all
    that hold the bar have their names beside them.
    """
    figure, front = Figure(figsize=(9, 5), layout="constrained"), pareto(tuned.standings)
    axes = figure.subplots()
    axes.plot(
        [one.ttft_share for one in front], [one.kept.quality for one in front], color=GREY, zorder=1
    )
    axes.axhline(tuned.bar.least, color=RED, linewidth=1)
    for one in tuned.standings:
        colour, at = GREEN if one.holds else BLUE, (one.ttft_share, one.kept.quality)
        fill = colour if one.prompts == tuned.prompts else "white"
        axes.scatter(*at, color=fill, edgecolors=colour, zorder=2)
        if one.holds or one in front:
            axes.annotate(one.candidate.label, at, (6, -3), textcoords="offset points", fontsize=7)
    kept = "exp(-KL)" if tuned.bar.kind == "fidelity" else "F1 / full prefill's"
    axes.set_title(f"{kept}, {tuned.prompts} prompts of {tuned.dataset}", loc="left", fontsize=9)
    axes.set_xlabel("time to first token, share of full prefill's")
    figure.savefig(path, format="svg")
