"""Draws what candidates keep against what they cost, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from cacheblend_rag.quality.tuning.ladder import Standing
from cacheblend_rag.quality.tuning.tune import Tuned

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 560, 50, 380
NAMES = 590
"""Left edge of the column of labels, in pixels."""
LINE = 16
"""Height of a label, in pixels."""
GREY, GREEN, RED, BLUE = "#9aa0a6", "#188038", "#c5221f", "#1a73e8"
TICKS = 4
Place = Callable[[Standing], tuple[float, float]]
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

    Filled points were measured on all prompts, hollow ones were dropped before. Green ones hold the
    bar, which is the red line. Those that no other one beats are joined by a line; they and all
    that hold the bar have their names beside the picture.
    """
    shown, front = tuned.standings, pareto(tuned.standings)
    across = _Axis.over([one.ttft_share for one in shown], LEFT, RIGHT, least=0.0)
    qualities = [tuned.bar.least, *(one.kept.quality for one in shown)]
    up = _Axis.over(qualities, BOTTOM, TOP)

    def place(one: Standing) -> tuple[float, float]:
        return across.at(one.ttft_share), up.at(one.kept.quality)

    named = [one for one in shown if one.holds or one in front]
    marks = [*_axes(tuned, across, up), *_names(named, place)]
    line = " ".join(f"{x},{y}" for x, y in map(place, front))
    marks.append(f'<polyline points="{line}" fill="none" stroke="{GREY}"/>')
    marks += [_point(one, *place(one), is_whole=one.prompts == tuned.prompts) for one in shown]
    return PAGE.format(width=WIDTH, height=HEIGHT, marks="\n".join(marks))


class _Axis:
    """Maps data values to pixels along one axis.

    low, high: the values at both ends. begin, end: where these are.
    """

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._high, self._begin, self._end = low, high, begin, end

    @classmethod
    def over(
        cls, values: Sequence[float], begin: float, end: float, least: float | None = None
    ) -> _Axis:
        """Return an axis over all values with a margin; it begins at ``least`` if given."""
        low, high = min(values) if least is None else least, max(values)
        room = 0.08 * (high - low) or 0.01
        return cls(low - room if least is None else least, high + room, begin, end)

    def at(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._begin + share * (self._end - self._begin), 1)

    @property
    def ticks(self) -> list[float]:
        step = (self._high - self._low) / TICKS
        return [self._low + step * index for index in range(TICKS + 1)]


def _axes(tuned: Tuned, across: _Axis, up: _Axis) -> list[str]:
    what = "exp(-KL)" if tuned.bar.kind == "fidelity" else "F1 / full prefill's"
    middle, bar = (LEFT + RIGHT) / 2, up.at(tuned.bar.least)
    marks = [
        _text(LEFT, TOP - 22, f"{what}, {tuned.prompts} prompts of {tuned.dataset}"),
        _text(middle, HEIGHT - 16, "time to first token, share of full prefill's", "middle"),
        _line(LEFT, BOTTOM, RIGHT, BOTTOM, GREY),
        _line(LEFT, TOP, LEFT, BOTTOM, GREY),
        _line(LEFT, bar, RIGHT, bar, RED),
        _text(RIGHT, bar - 5, f"bar {tuned.bar.least:g}", "end", RED),
    ]
    marks += [_text(across.at(tick), BOTTOM + 18, f"{tick:.2f}", "middle") for tick in across.ticks]
    marks += [_text(LEFT - 6, up.at(tick) + 4, f"{tick:.2f}", "end") for tick in up.ticks]
    return marks


def _names(named: Sequence[Standing], place: Place) -> list[str]:
    """Return labels in a column without overlaps, each with a thin line to its point."""
    marks, next_free = [], float(TOP)
    for one in sorted(named, key=lambda one: place(one)[1]):
        x, y = place(one)
        height = max(y, next_free)
        next_free = height + LINE
        marks.append(_line(x, y, NAMES - 4, height, GREY, width=0.5))
        marks.append(_text(NAMES, height + 4, one.candidate.label, colour=_colour(one)))
    return marks


def _colour(one: Standing) -> str:
    return GREEN if one.holds else BLUE


def _point(one: Standing, x: float, y: float, *, is_whole: bool) -> str:
    colour = _colour(one)
    fill = colour if is_whole else "white"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="{colour}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, *, width: float = 1) -> str:
    return (
        f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
