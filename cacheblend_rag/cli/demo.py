"""``cacheblend-rag demo``: a model answers questions on real passages in three ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cacheblend_rag.cli import output
from cacheblend_rag.demo.passages import QUESTIONS, PassageSample, load_passages
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import Embedder, VectorSearch
from cacheblend_rag.rag.prompt import INSTRUCTION
from cacheblend_rag.settings import EMBEDDED, EngineConfig

if TYPE_CHECKING:
    from cacheblend_rag.quality.dataset import EvalQuestion
    from cacheblend_rag.quality.measure import Measured

WAYS = {"full": "full prefill", "reuse": "plain reuse", "blend": "blend"}
RETRIEVED = 8
"""Passages per prompt."""
SHOWN_CHARACTERS = 100


def demo_command(
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}.")] = DEFAULT_MODEL,
    *,
    save_passages: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only write the passages, as text files."),
    ] = None,
) -> None:
    """Answer by full prefill, plain reuse and blend, side by side, on real passages."""
    if save_passages is not None:
        _save_passages(save_passages)
        return
    checks.check_installed(checks.RETRIEVAL_MODULES, "retrieval", "demo")
    checks.check_model(model)
    quiet_libraries()
    from cacheblend_rag.quality.dataset import PromptFrame
    from cacheblend_rag.quality.evaluate import opened
    from cacheblend_rag.quality.measure import FULL, Rule, measure

    sample, frame = load_passages(), PromptFrame.of(load_tokenizer(model), INSTRUCTION)
    questions = _retrieved(sample)
    with opened(EngineConfig(engine=EMBEDDED, model=model, instruction=frame.opening)) as engine:
        with output.progress_bar() as bar, bar.phase("computing the passages' KV"):
            indexed = engine.precompute(sample.documents(), progress=False)
        _print(
            f"[bold]{escape(model)}[/bold] indexed {len(sample.passages)} passages of MuSiQue "
            f"(Trivedi et al. 2022, CC BY 4.0), {indexed.computed_tokens:,} tokens, once, in "
            f"{output.duration(indexed.seconds)}; it runs in {engine.dtype}."
        )
        # Without the cost model, a busy machine does not turn a blend into ordinary prefill. Full
        # prefill computes the instruction, so the blend does, too.
        config = engine.config.with_changes(cost_model=False, reuse_prefix=False)
        reuse = Rule("reuse", config.with_changes(recompute_ratio=0.0))
        rules, prompts = [FULL, reuse, Rule("blend", config)], map(frame.to_measure, questions)
        answered: list[Mapping[str, Measured]] = []
        for found in measure(engine, prompts, rules, stop=("\n",), compare=False):
            _print_answered(questions[len(answered)], found)
            answered.append(found)
    _print_summary(answered)


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


def _retrieved(sample: PassageSample) -> list[EvalQuestion]:
    """Return the sample's questions, each with its nearest passages."""
    from cacheblend_rag.quality.dataset import EvalQuestion

    embedder, documents = Embedder(), sample.documents()
    search = VectorSearch(embedder.embed([passage.text for passage in sample.passages]))
    questions = []
    for asked in sample.questions[:QUESTIONS]:
        (vector,) = embedder.embed([asked.question])
        nearest = [documents[place] for place, _ in search.nearest(vector, RETRIEVED)]
        passages = tuple(document.to_chunks()[0] for document in nearest)
        questions.append(EvalQuestion(asked.question, asked.answers, passages, ()))
    return questions


def _print(line: str) -> None:
    output.result_console().print(line, soft_wrap=True)


def _print_answered(question: EvalQuestion, found: Mapping[str, Measured]) -> None:
    _print(f"\n[bold]{escape(question.question)}[/bold]  ({escape(question.answers[0])})")
    for way, label in WAYS.items():
        record, note = found[way].record, ""
        if way == "blend":
            reused = record.chunk_tokens - record.fresh_tokens
            work = f"{reused:,} of {record.prompt_tokens:,} tokens reused"
            note = f"  [dim]{escape(record.not_blended or work)}[/dim]"
        shown = shorten(record.text, SHOWN_CHARACTERS, placeholder=" ...") or "(nothing)"
        text = f"[green]{escape(shown)}[/]" if record.holds else f"[red]{escape(shown)} *[/]"
        _print(f"  {label:<13} {output.duration(record.ttft_seconds):>8}  {text}{note}")


def _print_summary(answered: Sequence[Mapping[str, Measured]]) -> None:
    """Print the speedup, and how many answers are right and equal to full prefill's."""
    records = {way: [found[way].record for found in answered] for way in WAYS}
    times = {way: median(one.ttft_seconds for one in records[way]) for way in WAYS}
    speedup = times["full"] / times["blend"]
    shown = ", ".join(f"{WAYS[way]} {output.duration(times[way])}" for way in WAYS)
    _print(
        f"\nFirst token, median of {len(answered)} questions: {shown}, "
        f"[bold]{speedup:.1f}x sooner[/bold]."
    )
    right = {way: sum(bool(one.holds) for one in records[way]) for way in WAYS}
    told = ", ".join(f"{right[way]} by {WAYS[way]}" for way in WAYS)
    full = [one.text.strip() for one in records["full"]]
    same = {
        way: sum(one.text.strip() == text for one, text in zip(records[way], full, strict=True))
        for way in WAYS
    }
    _print(
        f"Right of {len(answered)}: {told} (* does not hold the answer in brackets, word for "
        f"word). The same text as full prefill's: {same['reuse']} by plain reuse, "
        f"{same['blend']} by blend."
    )
    _print(
        "Plain reuse takes the passages' KV as it was stored, computed without the passages beside "
        "it; blend recomputes the tokens that need it. What full prefill gets wrong, the model "
        "gets wrong by itself."
    )
