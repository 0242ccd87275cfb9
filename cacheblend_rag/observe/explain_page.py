"""Writes an explained prompt as one HTML page that needs no script and no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cacheblend_rag.explanation import (
    ExplainedChunk,
    ExplainedPhase,
    ExplainedToken,
    Explanation,
    Histogram,
)
from cacheblend_rag.observe.explained import Explained
from cacheblend_rag.printable import printable

STRENGTHS = 4
"""Shades of recomputed tokens, by rank."""
WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 12, 38
"""Of the histogram."""
TICKS = 4


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that are shown alike. kind: a class of the page. hint: shown on hover."""

    text: str
    kind: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Passage:
    """A part of the prompt: a chunk, or the text between chunks (``chunk`` is None).

    runs: empty for text that is white space only.
    """

    runs: tuple[Run, ...]
    tokens: int
    chunk: ExplainedChunk | None = None
    number: int = 0


@dataclass(frozen=True)
class Bar:
    """A phase on the waterfall; left and width in percent of the time to the first token."""

    phase: ExplainedPhase
    left: float
    width: float
    parts: str = field(default="")


def explain_page(explained: Explained, title: str = "cacheblend-rag explain") -> str:
    """Return the page; its title must be plain text."""
    found = explained.explanation
    page: str = _template().render(
        title=printable(title),
        found=found,
        report=explained.report,
        cost=explained.cost,
        answer=printable(explained.answer).strip(),
        bars=waterfall(found),
        later=[one for one in found.phases if one.share == 0 and one.seconds > 0],
        passages=passages(explained),
        histogram=histogram_svg(found.histogram) if found.histogram else "",
    )
    return page


def waterfall(found: Explanation) -> list[Bar]:
    """Return the phases before the first token, as parts of the time to it."""
    first = found.first_token_seconds
    shown = [one for one in found.phases if one.share > 0]
    ends = [one.start + one.seconds for one in shown if one.start is not None]
    whole = max([first, *ends]) or 1.0
    return [
        Bar(
            one,
            left=100 * (one.start or 0.0) / whole,
            width=100 * one.seconds / whole,
            parts=", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in one.parts),
        )
        for one in shown
    ]


def passages(explained: Explained) -> list[Passage]:
    """Return the prompt in parts, each with its tokens; none if their texts are not known."""
    tokens, found = [printable(one) for one in explained.tokens], explained.explanation
    if not tokens:
        return []
    parts, done = [], 0
    placed = [chunk for chunk in found.chunks if chunk.start >= 0 and chunk.tokens]
    most = max((one.rank or 0 for chunk in placed for one in chunk.marked), default=0)
    for number, chunk in enumerate(sorted(placed, key=lambda one: one.start), start=1):
        if chunk.start > done:
            parts.append(_text(tokens[done : chunk.start]))
        marked = {one.position: one for one in chunk.marked}
        here = range(max(done, chunk.start), chunk.start + chunk.tokens)
        runs = tuple(_merged(_run(tokens[at], marked.get(at), most) for at in here))
        parts.append(Passage(runs, chunk.tokens, chunk, number))
        done = max(done, chunk.start + chunk.tokens)
    if done < len(tokens):
        parts.append(_text(tokens[done:]))
    return parts


def _text(tokens: Sequence[str]) -> Passage:
    shown = "".join(tokens).strip("\n")
    return Passage((Run(shown),) if shown.strip() else (), len(tokens))


def _run(text: str, marked: ExplainedToken | None, most: int) -> Run:
    if marked is None:
        return Run(text)
    if marked.fate == "protected":
        return Run(text, "protected", "protected: keeps what its own document told it")
    shade = 1 + (STRENGTHS - 1) * (marked.rank - 1) // most if marked.rank and most else 1
    facts = [f"token {marked.position}: recomputed"]
    if marked.rank is not None:
        facts.append(f"rank {marked.rank:,}")
    if marked.score is not None:
        facts.append(f"score {marked.score:.4g}")
    if marked.deviation is not None:
        facts.append(f"deviation {marked.deviation:.4g}")
    return Run(text, f"recomputed shade{shade}", ", ".join(facts))


def _merged(runs: Iterator[Run]) -> Iterator[Run]:
    """Join runs of tokens that need no mark of their own."""
    held: list[str] = []
    for run in runs:
        if run.kind:
            if held:
                yield Run("".join(held))
                held = []
            yield run
        else:
            held.append(run.text)
    if held:
        yield Run("".join(held))


def histogram_svg(found: Histogram) -> str:
    """Return bars over a logarithmic axis: recomputed tokens below, the others on top of them."""
    counts = list(zip(found.recomputed, found.others, strict=True))
    highest = _round_above(max(a + b for a, b in counts))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return LEFT + at / len(counts) * width

    def y(tokens: float) -> float:
        return HEIGHT - BOTTOM - tokens / highest * height

    parts = []
    for step in range(TICKS + 1):
        tick = highest * step // TICKS
        line = f'y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" {line}/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:,}</text>')
    middle = TOP + height / 2
    turned = f'transform="rotate(-90 11 {middle:.0f})"'
    parts.append(f'<text class="mid" x="11" y="{middle:.0f}" {turned}>tokens</text>')
    for index, (chosen, other) in enumerate(counts):
        low, high = found.edges[index : index + 2]
        told = f"<title>{low:.3g} to {high:.3g}: {chosen} recomputed, {other} not</title>"
        left, right = x(index + 0.08), x(index + 0.92)
        for kind, start, count in (("recomputed", 0, chosen), ("reused", chosen, other)):
            if count:
                top, bottom = y(start + count), y(start)
                parts.append(
                    f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" '
                    f'width="{right - left:.1f}" height="{bottom - top:.1f}">{told}</rect>'
                )
    below = f'y="{HEIGHT - BOTTOM + 16}"'
    for index in range(0, len(found.edges), max(1, len(counts) // TICKS)):
        edge = _short(found.edges[index])
        parts.append(f'<text class="mid" x="{x(index):.1f}" {below}>{edge}</text>')
    label = f"squared deviation of values at layer {found.layer}"
    parts.append(f'<text class="mid" x="{LEFT + width / 2:.0f}" y="{HEIGHT - 4}">{label}</text>')
    opening = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return f"{opening}{''.join(parts)}</svg>"


def _round_above(most: int) -> int:
    """Return a number from ``most`` on that can be divided into TICKS short ones."""
    unit: int = 10 ** max(0, math.floor(math.log10(max(most, 1) / TICKS)))
    return next(step * unit * TICKS for step in (1, 2, 5, 10) if step * unit * TICKS >= most)


def _short(number: float) -> str:
    """Return a number with two digits, without an exponent if that is short."""
    return f"{number:.0f}" if 100 <= number < 1e5 else f"{number:.2g}"


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["ms"] = lambda seconds: f"{1000 * seconds:,.1f} ms"
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    environment.filters["number"] = lambda found: "" if found is None else f"{found:.3g}"
    environment.filters["clean"] = lambda text: printable(str(text))
    source = Path(__file__).with_name("explain_page.html").read_text("utf-8")
    return environment.from_string(source)
