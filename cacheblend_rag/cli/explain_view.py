"""Prints an explained prompt in a terminal: passages, chunks, the waterfall, plots of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cacheblend_rag.cli import output

if TYPE_CHECKING:
    from cacheblend_rag.explanation import Explanation, Histogram
    from cacheblend_rag.observe.explain_page import Passage
    from cacheblend_rag.observe.explained import Cost, Explained
    from cacheblend_rag.trace import TracedLayer

BAR = 36
SHOWN_RUNS = 400
"""Most marked pieces of a passage that are printed; the page shows all."""
SHOWN_LAYERS = 32
STYLES = {
    "recomputed shade1": "black on bright_yellow",
    "recomputed shade2": "black on yellow",
    "recomputed shade3": "black on yellow",
    "recomputed shade4": "bold yellow",
    "protected": "underline blue",
}


def print_explained(found: Explained) -> None:
    """Print an explained prompt: summary, phases, chunks, highlighted tokens, deviations."""
    from cacheblend_rag.observe.explain_page import passages

    console, told = output.result_console(), found.explanation
    console.print(Text(output.printable(told.summary)))
    for note in told.notes:
        console.print(Text(f"note: {output.printable(note)}", style="dim"))
    if found.cost is not None:
        console.print(Text(_cost(found.cost)))
    _section("time to the first token")
    console.print(_waterfall(told))
    if told.chunks:
        _section("chunks")
        _print_chunks(told)
    shown = passages(found)
    if shown and told.blended:
        _section("the prompt's chunks: recomputed tokens highlighted, protected ones underlined")
        for part in shown:
            if part.chunk is not None:
                console.print(_passage(part))
    if told.histogram is not None:
        _section(f"KV deviation: squared difference of values at layer {told.histogram.layer}")
        console.print(Text("\n".join(_bars(told.histogram))))
    if told.layers:
        _section("deviation by layer, as a share of the values' squared length")
        console.print(_layers(told))


def _section(title: str) -> None:
    output.result_console().print(Text(f"\n{title}", style="bold"))


def _cost(cost: Cost) -> str:
    line = (
        f"full prefill: first token after {output.duration(cost.full_seconds)}, blend without a "
        f"trace {output.duration(cost.blend_seconds)}, {cost.speedup:.1f}x sooner"
    )
    if cost.divergence is None:
        return f"{line}; KL divergence not known"
    return f"{line}; KL divergence {cost.divergence:.4f} nats per token over {cost.tokens} tokens"


def _waterfall(told: Explanation) -> Table:
    from cacheblend_rag.observe.explain_page import waterfall

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, width=BAR)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for bar in waterfall(told):
        start = min(BAR - 1, round(bar.left * BAR / 100))
        length = max(1, min(BAR - start, round(bar.width * BAR / 100)))
        phase = bar.phase
        parts = f" ({output.printable(bar.parts)})" if bar.parts else ""
        table.add_row(
            Text(f"  {phase.name.replace('_', ' ')}"),
            Text(" " * start + "█" * length, style="blue"),
            Text(output.duration(phase.seconds)),
            Text(f"{output.percent(phase.share)}{parts}"),
        )
    return table


def _print_chunks(told: Explanation) -> None:
    rows = [
        (
            index,
            output.one_line(one.document_id or one.chunk_id[:12]),
            "-" if one.start < 0 else f"{one.start:,}",
            f"{one.tokens:,}",
            "hit" if one.hit else "miss",
            output.printable(one.why + (f" [{one.code}]" if one.code else "")),
        )
        for index, one in enumerate(told.chunks, start=1)
    ]
    output.print_rows(("#", "document", "at", "tokens", "", "why"), rows)


def _passage(part: Passage) -> Text:
    chunk = part.chunk
    name = (chunk.document_id or chunk.chunk_id[:12]) if chunk else ""
    text = Text()
    text.append(f"#{part.number} {output.one_line(name)}: ", style="bold")
    for run in part.runs[:SHOWN_RUNS]:
        text.append(run.text, style=STYLES.get(run.kind, ""))
    if len(part.runs) > SHOWN_RUNS:
        text.append(" ... (--html FILE shows all of it)", style="dim")
    return text


def _bars(found: Histogram) -> Iterator[str]:
    """Yield a line for each pair of bins: recomputed tokens filled, the others hollow."""
    recomputed, others = _paired(found.recomputed), _paired(found.others)
    most = max(a + b for a, b in zip(recomputed, others, strict=True)) or 1
    for index, (chosen, other) in enumerate(zip(recomputed, others, strict=True)):
        low, high = found.edges[2 * index], found.edges[min(2 * index + 2, len(found.edges) - 1)]
        filled = round(chosen / most * BAR)
        hollow = round((chosen + other) / most * BAR) - filled
        yield (
            f"  {low:8.2g} to {high:8.2g}  {'█' * filled}{'░' * hollow} "
            f"{chosen + other:,}" + (f" ({chosen:,} recomputed)" if other and chosen else "")
        )
    if found.zeros:
        yield f"  {found.zeros:,} tokens did not change"


def _paired(counts: Sequence[int]) -> list[int]:
    return [sum(counts[start : start + 2]) for start in range(0, len(counts), 2)]


def _layers(told: Explanation) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("  layer", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("share of length", no_wrap=True)
    table.add_column("", justify="right")
    every = max(1, -(-len(told.layers) // SHOWN_LAYERS))
    shown = [one for index, one in enumerate(told.layers) if index % every == 0]
    most = max(map(_share, shown)) or 1.0
    for one in shown:
        share = _share(one)
        table.add_row(
            str(one.layer),
            f"{one.tokens:,}",
            Text("█" * round(share / most * BAR), style="blue"),
            f"{share:.3f}",
        )
    return table


def _share(one: TracedLayer) -> float:
    return one.values.mean / one.values.size if one.values.size > 0 else 0.0
