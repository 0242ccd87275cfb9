"""``cacheblend-rag explain``: why a prompt was served as it was, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.collection import DEFAULT_FOLDER
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.ordering import PassageOrder
from cacheblend_rag.settings import EMBEDDED, check_namespace

if TYPE_CHECKING:
    from cacheblend_rag.explanation import Explanation, Histogram
    from cacheblend_rag.observe.explain_page import Passage
    from cacheblend_rag.observe.explained import Cost, Explained
    from cacheblend_rag.trace import TracedLayer

MAX_TOKENS = 16


def explain_command(
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="A question to a collection.")
    ] = None,
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="A file that holds a prompt.")
    ] = None,
    model: options.ModelOption = DEFAULT_MODEL,
    kv_path: Annotated[
        Path | None,
        typer.Option(
            envvar=options.KV_PATH_VARIABLE,
            help="With --prompt: the folder of chunk KV, and of the list of known chunks.",
        ),
    ] = None,
    passage: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="With --prompt: a text file that is a known chunk."),
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(help="With --prompt: the instruction that chunks were precomputed after."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="With --prompt: of the chunk KV.")] = "default",
    top_k: asking.TopKOption = asking.TOP_K,
    order: asking.OrderOption = PassageOrder.SCORE,
    max_tokens: options.MaxTokensOption = MAX_TOKENS,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    profile: options.ProfileOption = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also measure full prefill: its time, and how far the blend is."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page that needs no script and no network."),
    ] = None,
    engine: options.EngineOption = None,
    device: options.DeviceOption = None,
    store: options.StoreOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Explain which chunks were reused and why, which tokens were recomputed, and what it cost.

    The prompt is answered once with a trace.
    """
    if (question is None) == (prompt is None):
        raise ConfigError("explain: give one of QUESTION and --prompt FILE")
    _check_page(html)
    asked = clean_question(question) if question is not None else ""
    with output.stdout_reserved(as_json):
        if prompt is not None:
            text = options.read_text(prompt, "--prompt")
            known = [options.read_text(one, "--passage") for one in passage or ()]
            check_namespace(namespace)
            checks.check_blend(ratio, selector)
            known_in = None if kv_path is None else options.store_folder(kv_path)
            config = asking.checked_config(
                engine or EMBEDDED,
                model,
                store=options.store_settings(store, kv_path=known_in),
                device=device,
                profile=profile,
                instruction=instruction or "",
                namespace=namespace,
            )
            from cacheblend_rag.observe.explained import explain_prompt

            with output.progress_bar() as bar:
                opened = asking.load_engine(config, bar)
            with closing(opened):
                opened.register(known)
                found = explain_prompt(
                    opened,
                    text,
                    config=opened.config.with_given(recompute_ratio=ratio, selector=selector),
                    max_tokens=max_tokens,
                    compare=compare,
                )
        else:
            placement = Placement(device, options.collection_store(store), profile=profile)
            blend = {"ratio": ratio, "selector": selector}
            with asking.opened(folder, placement, engine, **blend) as asker:
                from cacheblend_rag.observe.explained import explain_prompt

                sources = asker.retrieve(asked, top_k, order)
                fitted = asker.fit((), asked, sources, max_tokens)
                found = explain_prompt(
                    asker.engine,
                    fitted.prepared,
                    config=asker.config,
                    max_tokens=max_tokens,
                    compare=compare,
                )
    _show(found, html, as_json=as_json)


def _check_page(html: Path | None) -> None:
    """Raise StoreError when a page cannot be written, before anything is loaded."""
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise StoreError(f"--html {html} cannot be written: name a file in an existing folder")


def _show(found: Explained, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        from cacheblend_rag.observe.explain_page import explain_page

        try:
            html.write_bytes(explain_page(found).encode("utf-8", "replace"))
        except OSError as error:
            raise StoreError(f"--html {html} cannot be written: {error.strerror}") from error
    if as_json:
        output.print_json(found.to_dict())
        return
    print_explained(found)
    if html is not None:
        output.side_console().print(f"page: {html}", markup=False, soft_wrap=True)


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
            output.printable(one.why + (f" [{one.reason_code}]" if one.reason_code else "")),
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
