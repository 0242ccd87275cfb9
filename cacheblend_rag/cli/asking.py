"""What commands that ask share: options, opening engines, printing sources and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import output
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.rag.collection import open_quietly
from cacheblend_rag.rag.prompt import PassageOrder, Source

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.progress import ProgressCallbacks
    from cacheblend_rag.report import BlendReport
    from cacheblend_rag.settings import EngineConfig

TOP_K = 4
MAX_TOKENS = 256
SHOWN_CHARACTERS = 60

FromOption = Annotated[
    Path, typer.Option("--from", metavar="FOLDER", help="A collection made by `index`.")
]
TopKOption = Annotated[int, typer.Option(min=1, help="Passages to retrieve.")]
OrderOption = Annotated[
    PassageOrder,
    typer.Option(help="Best first, in document order (best document first), or best last."),
]


def load_engine(config: EngineConfig, progress: ProgressCallbacks) -> Engine:
    """Open the engine of a config, and show progress; raises what ``open_engine`` raises."""
    with progress.phase("loading the libraries"):
        quiet_libraries()
    with progress.phase(f"loading the model {config.model}".rstrip()):
        return open_quietly(config)


def written(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Yield the deltas, and print their text on stdout at once, with a line break at the end."""
    begun = False
    for delta in deltas:
        text = delta.text if begun else delta.text.lstrip()
        begun = begun or bool(text)
        typer.echo(output.printable(text), nl=False)
        yield delta
    typer.echo()


def print_sources(sources: Sequence[Source]) -> None:
    """Print one line per passage."""
    for source in sources:
        start = shorten(output.printable(source.chunk.text), SHOWN_CHARACTERS, placeholder=" ...")
        name = output.one_line(source.chunk.document_id or "")
        typer.echo(f"  {source.score:.2f}  {name} [{source.position}]  {start}")


def print_report(report: BlendReport) -> None:
    """Print a request's report, in a few lines."""
    for line in report_lines(report):
        typer.echo(f"  {line}")


def report_lines(report: BlendReport) -> list[str]:
    """Return a line on tokens and time, one on the selector or reason, and those on chunks."""
    seconds = report.seconds.time_to_first_token
    exact = f" ({report.prefix_tokens:,} of an earlier prompt)" if report.prefix_tokens else ""
    lines = [
        f"{report.prompt_tokens:,} tokens: {report.reused_tokens:,} reused{exact}, "
        f"{report.recomputed_tokens:,} recomputed, {report.computed_tokens:,} computed; "
        f"first token after {output.duration(seconds)}"
    ]
    if report.blended:
        told = f" ({report.selector_reason})" if report.selector_reason else ""
        lines.append(
            f"blended: {report.selector}{told}, ratio {report.recompute_ratio:g}, "
            f"{output.percent(report.compute_share)} of full prefill's work"
        )
    else:
        lines.append(f"ordinary prefill: {report.reason}")
    fates = {"passages": Counter[str](), "parts of earlier turns": Counter[str]()}
    for chunk in report.chunks:
        # A collection's chunks have a document; the parts of earlier turns have none.
        kind = "passages" if chunk.document_id is not None else "parts of earlier turns"
        fates[kind][f"reused from {chunk.tier}" if chunk.hit else str(chunk.reason)] += 1
    for kind, counts in fates.items():
        if counts:
            told = ", ".join(f"{count} {fate}" for fate, count in counts.items())
            lines.append(f"{kind}: {told}")
    return lines
