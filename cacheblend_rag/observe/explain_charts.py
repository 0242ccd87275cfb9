"""Draws an explanation's numbers as SVG, in the colours of the page that holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from cacheblend_rag.explanation import Histogram
from cacheblend_rag.trace import TracedLayer

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 12, 38
TICKS = 4
Points = Sequence[tuple[float, float]]
Lines = Mapping[str, Points]


def histogram_svg(found: Histogram) -> str:
    """Return bars over a logarithmic axis: recomputed tokens below, the others on top of them."""
    most = max(a + b for a, b in zip(found.recomputed, found.others, strict=True)) or 1
    highest = max(TICKS, math.ceil(_round_above(most)))
    frame = _Frame(0, len(found.recomputed), 0, highest)
    parts = frame.grid([highest * step / TICKS for step in range(TICKS + 1)], "tokens")
    for index, (chosen, other) in enumerate(zip(found.recomputed, found.others, strict=True)):
        low, high = found.edges[index : index + 2]
        label = f"{low:.3g} to {high:.3g}: {chosen} recomputed, {other} not"
        left, right = frame.x(index + 0.08), frame.x(index + 0.92)
        for kind, start, count in (("recomputed", 0, chosen), ("reused", chosen, other)):
            if count:
                top, bottom = frame.y(start + count), frame.y(start)
                parts.append(
                    f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" '
                    f'width="{right - left:.1f}" height="{bottom - top:.1f}">'
                    f"<title>{escape(label)}</title></rect>"
                )
    step = max(1, len(found.recomputed) // TICKS)
    for index in range(0, len(found.edges), step):
        parts.append(frame.below(index, _short(found.edges[index])))
    return frame.svg(parts, f"squared deviation of values at layer {found.layer}")


def curve_svg(layers: Sequence[TracedLayer]) -> str:
    """Return how far fresh keys and values are from the stored ones, relative to their length."""
    lines = {
        "values": [(one.layer, _relative(one.values.mean, one.values.size)) for one in layers],
        "keys": [(one.layer, _relative(one.keys.mean, one.keys.size)) for one in layers],
    }
    most = max((y for line in lines.values() for _, y in line), default=0)
    return _lines(lines, 0, _round_above(most), "share of squared length")


def _relative(change: float, size: float) -> float:
    return change / size if size > 0 else 0.0


def _round_above(most: float) -> float:
    """Return a number from ``most`` on that can be divided into TICKS short ones."""
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most / TICKS))
    return next(step * unit * TICKS for step in (1, 2, 2.5, 5, 10) if step * unit * TICKS >= most)


def _tick(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:.3g}"


def _short(number: float) -> str:
    """Return a number with two digits, without an exponent if that is short."""
    return f"{number:.0f}" if 100 <= number < 1e5 else f"{number:.2g}"


def _lines(lines: Lines, low: float, high: float, label: str) -> str:
    known = [x for line in lines.values() for x, _ in line]
    if not known:
        return ""
    first, last = min(known), max(known)
    frame = _Frame(first, last if last > first else first + 1, low, high)
    ticks = [low + (high - low) * step / TICKS for step in range(TICKS + 1)]
    parts = frame.grid(ticks, label)
    for index, (name, line) in enumerate(lines.items()):
        if not line:
            continue
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="line line{index}" points="{path}"/>')
        parts += [
            f'<circle class="dot{index}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6">'
            f"<title>layer {x:g}: {y:.3g} ({escape(name)})</title></circle>"
            for x, y in line
        ]
    step = max(1, round((last - first) / 8))
    parts += [frame.below(x, f"{x:g}") for x in range(int(first), int(last) + 1, step)]
    return frame.svg(parts, "layer")


class _Frame:
    """Axes: from x0 to x1 and from y0 to y1."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self._x0, self._x1, self._y0, self._y1 = x0, x1, y0, y1

    def x(self, at: float) -> float:
        return LEFT + (at - self._x0) / (self._x1 - self._x0) * (WIDTH - LEFT - RIGHT)

    def y(self, at: float) -> float:
        share = (at - self._y0) / (self._y1 - self._y0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def grid(self, ticks: Sequence[float], label: str) -> list[str]:
        parts = []
        for tick in ticks:
            y = self.y(tick)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{_tick(tick)}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="mid" x="11" y="{middle:.0f}" '
            f'transform="rotate(-90 11 {middle:.0f})">{escape(label)}</text>'
        )
        return parts

    def below(self, at: float, text: str) -> str:
        return (
            f'<text class="mid" x="{self.x(at):.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{escape(text)}</text>"
        )

    def svg(self, parts: Sequence[str], label: str) -> str:
        middle = (LEFT + WIDTH - RIGHT) / 2
        named = f'<text class="mid" x="{middle:.0f}" y="{HEIGHT - 4}">{escape(label)}</text>'
        return _svg(HEIGHT, [*parts, named], label)


def _svg(height: int, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
