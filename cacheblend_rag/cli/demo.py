"""``cacheblend-rag demo``: a model answers questions on real passages in three ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cacheblend_rag.cli import options, output
from cacheblend_rag.demo.passages import PassageSample, load_passages
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.errors import StoreError, UnsupportedModelError
from cacheblend_rag.models import DEFAULT_MODEL, packaged
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.prompt import INSTRUCTION, RagPrompt, Turn
from cacheblend_rag.rag.retrieval import Embedder, VectorSearch
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from rich.console import Console

    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.quality.side_by_side import Answers, SideBySide

SHOWN_CHARACTERS = 100


def demo_command(
    *,
    model: Annotated[str, typer.Option(help="The model: a name, file or folder.")] = DEFAULT_MODEL,
    save_passages: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only write the passages, as text files."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Answer by full prefill, plain reuse and blend, side by side, on real passages."""
    if save_passages is not None:
        _save_passages(save_passages)
        return
    checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", "demo")
    checks.check_model(model)
    console = output.side_console() if as_json else output.result_console()
    with output.stdout_reserved(as_json):
        quiet_libraries()
        plain = _show(console, model)
    if as_json:
        output.print_json(plain)


def _save_passages(folder: Path) -> None:
    """Write the real passages, and print how to ask about them."""
    sample = load_passages()
    try:
        sample.save(folder)
    except OSError as error:
        raise StoreError(f"--save-passages {folder} cannot be created: {error.strerror}") from error
    typer.echo(f"{folder}: {len(sample.passages)} passages of MuSiQue (NOTICE: CC BY 4.0); ask")
    for item in sample.questions:
        typer.echo(f"  {item.question}  ({item.answers[0]})")
    typer.echo(f"to begin: cacheblend-rag index {folder}")


def _show(console: Console, model: str) -> dict[str, Any]:
    """Answer the sample's questions and print them; return plain JSON values."""
    from cacheblend_rag.quality.side_by_side import totals_of

    sample = load_passages()
    console.print(f"[bold]{escape(_described(model))}[/bold]", soft_wrap=True)
    with _opened(model, sample) as (asker, dtype):
        with output.progress_bar() as bar, bar.phase("computing the passages' KV"):
            indexed = asker.index()
        console.print(
            f"Indexed {len(sample.passages)} passages of MuSiQue (Trivedi et al. 2022, CC BY 4.0), "
            f"{indexed.computed_tokens:,} tokens, once, in {output.duration(indexed.seconds)}; "
            f"the model runs in {dtype}.",
            soft_wrap=True,
        )
        answered = []
        for found in asker.answer_all(sample.questions[:6]):  # a minute on two CPU cores
            answered.append(found)
            _print_answered(console, found)
    totals = totals_of(answered)
    for line in _summary(totals):
        console.print(line, soft_wrap=True)
    return {
        "model": model,
        "dtype": dtype,
        "passages": len(sample.passages),
        "indexed_tokens": indexed.computed_tokens,
        "index_seconds": indexed.seconds,
        "questions": [found.to_dict() for found in answered],
        "totals": totals,
    }


@contextmanager
def _opened(model: str, sample: PassageSample) -> Iterator[tuple[SideBySide, str]]:
    """Load the model and the retriever; yields the model's dtype, too."""
    from cacheblend_rag.quality.side_by_side import SideBySide

    documents = sample.documents()
    prompt = RagPrompt(load_tokenizer(model), INSTRUCTION)
    embedder = Embedder()
    search = VectorSearch(embedder.embed([passage.text for passage in sample.passages]))

    def retrieve(question: str, count: int) -> list[Any]:
        (vector,) = embedder.embed([question])
        return [documents[place] for place, _ in search.nearest(vector, count)]

    with closing(open_engine(EMBEDDED, model=model, instruction=prompt.lead_in)) as engine:
        if engine.blend_refusal:
            raise UnsupportedModelError(f"model={model!r}: {engine.blend_refusal}")
        yield (
            SideBySide(
                engine,
                documents,
                retrieve,
                lambda question, passages: prompt.segmented(
                    [Turn(question, passages)], engine.registry
                ),
            ),
            engine.dtype or "a precision of its own",
        )


def _described(model: str) -> str:
    """Return a model's name, with its title if it is packaged."""
    known = packaged.MODELS.get(model)
    return f"{model}: {known.title}" if known else model


def _print_answered(console: Console, found: Answers) -> None:
    question = found.question
    console.print(
        f"\n[bold]{escape(question.question)}[/bold]  ({escape(question.answers[0])})",
        soft_wrap=True,
    )
    report = found.blend.report
    work = f"{report.reused_tokens:,} of {report.prompt_tokens:,} tokens reused"
    if not report.blended:
        work = f"not blended: {report.reason}"
    for label, generation, note in (
        ("full prefill", found.full, ""),
        ("plain reuse", found.reuse, ""),
        ("blend", found.blend, f"  [dim]{escape(work)}[/dim]"),
    ):
        seconds = output.duration(generation.report.seconds.time_to_first_token)
        console.print(
            f"  {label:<13} {seconds:>8}  {_marked(found, generation)}{note}", soft_wrap=True
        )


def _marked(found: Answers, generation: Generation) -> str:
    text = escape(shorten(generation.text, SHOWN_CHARACTERS, placeholder=" ...") or "(nothing)")
    return f"[green]{text}[/green]" if found.right(generation) else f"[red]{text} *[/red]"


def _summary(told: Mapping[str, Any]) -> list[str]:
    """Return lines on the speedup and the difference of answers."""
    count = told["questions"]
    full, reuse, blend = (
        output.duration(told[f"{way}_seconds"]) for way in ("full", "reuse", "blend")
    )
    lines = [
        f"\nFirst token, median of {count} questions: full prefill {full}, plain reuse {reuse}, "
        f"blend {blend}, [bold]{told['speedup']:.1f}x sooner[/bold]; "
        f"{told['reused_tokens']:,.0f} of {told['prompt_tokens']:,.0f} tokens reused.",
        f"Right: {told['full_right']} of {count} by full prefill, {told['reuse_right']} by plain "
        f"reuse, {told['blend_right']} by blend (* does not hold the answer in brackets, word for "
        f"word). The same text as full prefill's: {told['reuse_same']} by plain reuse, "
        f"{told['blend_same']} by blend.",
    ]
    if told["reuse_same"] < count:
        lines.append(
            "Plain reuse takes the passages' KV as it was stored, computed without the passages "
            "beside it; blend recomputes the tokens that need it."
        )
    if told["full_right"] < count:
        lines.append("What full prefill gets wrong, the model gets wrong by itself.")
    return lines
