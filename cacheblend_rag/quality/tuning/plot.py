"""Draws what candidates keep against what they cost, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from cacheblend_rag.quality.tuning.ladder import Standing
from cacheblend_rag.quality.tuning.tune import Tuned

WIDTH, HEIGHT, MARGIN = 720, 420, 60
GREY, GREEN, RED = "#9aa0a6", "#188038", "#c5221f"
Place = Callable[[float, float], tuple[float, float]]
PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="sans-serif" font-size="11">
<rect width="{width}" height="{height}" fill="white"/>
{marks}
</svg>
"""


def pareto(standings: Sequence[Standing]) -> list[Standing]:
    """Return the candidates that no other one beats in both time and quality, by time."""
    front: list[Standing] = []
    for one in sorted(standings, key=lambda one: (one.ttft_share, -one.kept.quality)):
        if not front or one.kept.quality > front[-1].kept.quality:
            front.append(one)
    return front


def plot(tuned: Tuned) -> str:
    """Return a picture: time to first token across, the share of quality that is kept up.

    Candidates on the line are beaten by none; those right of 1 are slower than full prefill. The
    horizontal line is the bar, the green ones hold it on all prompts.
    """
    shown, front = tuned.standings, pareto(tuned.standings)
    right = 1.05 * max(1.0, *(one.ttft_share for one in shown))
    qualities = [tuned.bar.least, 1.0, *(one.kept.quality for one in shown)]
    bottom, top = min(qualities) - 0.02, max(qualities) + 0.02

    def place(across: float, up: float) -> tuple[float, float]:
        x = MARGIN + across / right * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (up - bottom) / (top - bottom) * (HEIGHT - 2 * MARGIN)
        return round(x, 1), round(y, 1)

    marks = _axes(place, tuned, right=right, bottom=bottom, top=top)
    line = " ".join(f"{x},{y}" for x, y in (place(*_at(one)) for one in front))
    marks.append(f'<polyline points="{line}" fill="none" stroke="{GREY}"/>')
    for one in shown:
        x, y = place(*_at(one))
        colour = GREEN if one.holds else GREY
        marks.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        if one in front:
            marks.append(_text(x + 6, y - 6, one.candidate.label))
    return PAGE.format(width=WIDTH, height=HEIGHT, marks="\n".join(marks))


def _at(one: Standing) -> tuple[float, float]:
    return one.ttft_share, one.kept.quality


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(place: Place, tuned: Tuned, *, right: float, bottom: float, top: float) -> list[str]:
    marks = [_text(WIDTH / 2, HEIGHT - 12, "time to first token / full prefill's", "middle")]
    what = "exp(-KL)" if tuned.bar.kind == "fidelity" else "F1 / full prefill's"
    marks.append(_text(MARGIN, MARGIN / 2, f"{what}, {tuned.prompts} prompts of {tuned.dataset}"))
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(tick, bottom)
        marks.append(_text(x, y + 16, f"{tick:g}", "middle"))
    for tick in (bottom, (bottom + top) / 2, top):
        x, y = place(0, tick)
        marks.append(_text(x - 6, y, f"{tick:.2f}", "end"))
    (left, y), (end, _) = place(0, tuned.bar.least), place(right, tuned.bar.least)
    marks.append(f'<line x1="{left}" y1="{y}" x2="{end}" y2="{y}" stroke="{RED}"/>')
    marks.append(_text(end, y - 4, f"bar {tuned.bar.least:g}", "end"))
    return marks
