"""What commands that ask share: options, opening engines, printing sources and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import output
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.rag.answering import Asker
from cacheblend_rag.rag.collection import open_quietly
from cacheblend_rag.rag.prompt import PassageOrder, Source
from cacheblend_rag.reason import ReasonCode

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Delta
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.progress import ProgressCallbacks
    from cacheblend_rag.report import BlendReport, ChunkReport
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


def opened(folder: Path, given: Mapping[str, Any]) -> Asker:
    """Open a collection, and show progress of loading; given: settings by name, see Asker."""
    with output.progress_bar() as bar:
        return Asker(folder, given, progress=bar)


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
    """Print a request's report, in at most three lines."""
    for line in report_lines(report):
        typer.echo(f"  {line}")


def report_lines(report: BlendReport) -> list[str]:
    """Return a line on tokens and time, one on the selector or reason, and one on the chunks."""
    seconds = report.seconds.time_to_first_token
    exact = f" ({report.prefix_tokens:,} of an earlier prompt)" if report.prefix_tokens else ""
    lines = [
        f"{report.prompt_tokens:,} tokens: {report.reused_tokens:,} reused{exact}, "
        f"{report.recomputed_tokens:,} recomputed, {report.computed_tokens:,} computed; "
        f"first token after {output.duration(seconds)}"
    ]
    if report.blended:
        work = f"{output.percent(report.compute_share)} of full prefill's work"
        lines.append(f"blended: {_rule(report)}, {work}")
    else:
        lines.append(f"ordinary prefill: {report.reason}")
    # A collection's chunks have a document; the parts of earlier turns have none.
    passages = [chunk for chunk in report.chunks if chunk.document_id is not None]
    turns = [chunk for chunk in report.chunks if chunk.document_id is None]
    named = {"passages": passages, "parts of earlier turns": turns}
    parts = [f"{name}: {_fates(chunks)}" for name, chunks in named.items() if chunks]
    return [*lines, "; ".join(parts)] if parts else lines


def _fates(chunks: Iterable[ChunkReport]) -> str:
    fates = Counter(_fate(chunk) for chunk in chunks)
    return ", ".join(f"{count} {fate}" for fate, count in fates.items())


def _rule(report: BlendReport) -> str:
    """Return the selector and ratio; if nothing was recomputed on purpose, why."""
    why = report.selector_reason
    if why is not None and why.code is ReasonCode.CONTEXT_KEPT:
        return (
            "nothing is recomputed by this rule: each passage's KV was computed in its own "
            "document, which recomputed KV would forget"
        )
    told = f" ({why})" if why else ""
    return f"{report.selector}{told}, ratio {report.recompute_ratio:g}"


def _fate(chunk: ChunkReport) -> str:
    return f"reused from {chunk.tier}" if chunk.hit else str(chunk.reason)
