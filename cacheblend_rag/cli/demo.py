"""``cacheblend-rag demo``: a model answers questions on real passages in three ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cacheblend_rag.cli import options, output
from cacheblend_rag.demo.passages import PassageSample, load_passages
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS, packaged
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import Embedder, VectorSearch
from cacheblend_rag.rag.prompt import INSTRUCTION
from cacheblend_rag.settings import EMBEDDED, EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.quality.dataset import EvalQuestion, PromptFrame
    from cacheblend_rag.quality.measure import Measured

WAYS = {"full": "full prefill", "reuse": "plain reuse", "blend": "blend"}
QUESTIONS, RETRIEVED = 6, 8
"""How many questions are asked (a minute on two CPU cores), and passages per prompt."""
SHOWN_CHARACTERS = 100


def demo_command(
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}.")] = DEFAULT_MODEL,
    *,
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
    from cacheblend_rag.quality.dataset import PromptFrame
    from cacheblend_rag.quality.evaluate import opened

    sample, known = load_passages(), packaged.MODELS.get(model)
    title = f"{model}: {known.title}" if known else model
    console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    frame = PromptFrame.of(load_tokenizer(model), INSTRUCTION)
    config = EngineConfig(engine=EMBEDDED, model=model, instruction=frame.opening)
    answered = []
    with opened(config) as engine:
        with output.progress_bar() as bar, bar.phase("computing the passages' KV"):
            indexed = engine.precompute(sample.documents(), progress=False)
        dtype = engine.dtype or "a precision of its own"
        console.print(
            f"Indexed {len(sample.passages)} passages of MuSiQue (Trivedi et al. 2022, CC BY 4.0), "
            f"{indexed.computed_tokens:,} tokens, once, in {output.duration(indexed.seconds)}; "
            f"the model runs in {dtype}.",
            soft_wrap=True,
        )
        for question, found in _answers(engine, frame, sample):
            ways = {way: _plain(found[way]) for way in WAYS}
            passages = [passage.document_id for passage in question.passages]
            about = {"question": question.question, "gold": question.answers[0]}
            answered.append({**about, "passages": passages, **ways})
            _print_answered(console, question, found)
    totals = _totals(answered)
    for line in _summary(totals):
        console.print(line, soft_wrap=True)
    return {
        "model": model,
        "dtype": dtype,
        "passages": len(sample.passages),
        "indexed_tokens": indexed.computed_tokens,
        "index_seconds": indexed.seconds,
        "questions": answered,
        "totals": totals,
    }


def _answers(
    engine: Engine, frame: PromptFrame, sample: PassageSample
) -> Iterator[tuple[EvalQuestion, dict[str, Measured]]]:
    """Yield each question with its retrieved passages, and the answers by full, reuse and blend."""
    from cacheblend_rag.quality.dataset import EvalQuestion
    from cacheblend_rag.quality.measure import FULL, Rule, measure

    embedder, documents = Embedder(), sample.documents()
    search = VectorSearch(embedder.embed([passage.text for passage in sample.passages]))
    questions = []
    for asked in sample.questions[:QUESTIONS]:
        (vector,) = embedder.embed([asked.question])
        nearest = [documents[place] for place, _ in search.nearest(vector, RETRIEVED)]
        passages = tuple(document.to_chunks()[0] for document in nearest)
        questions.append(EvalQuestion(asked.question, asked.answers, passages, ()))
    # Without the cost model, a busy machine does not turn a blend into ordinary prefill. Full
    # prefill computes the instruction, so the blend does, too.
    config = engine.config.with_changes(cost_model=False, reuse_prefix=False)
    rules = [FULL, Rule("reuse", config.with_changes(recompute_ratio=0.0)), Rule("blend", config)]
    prompts = map(frame.to_measure, questions)
    yield from zip(
        questions, measure(engine, prompts, rules, stop=("\n",), compare=""), strict=True
    )


def _plain(found: Measured) -> dict[str, Any]:
    record, report = found.record, found.generation and found.generation.report.to_dict()
    seconds = record.ttft_seconds
    return {
        "text": record.text.strip(), "right": bool(record.holds), "seconds": seconds,
        "report": report,
    }  # fmt: skip


def _totals(answered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up: right answers, answers equal to full prefill's, medians of tokens and of times."""
    blends = [one["blend"]["report"] for one in answered]
    totals: dict[str, Any] = {
        "questions": len(answered),
        "prompt_tokens": median(report["prompt_tokens"] for report in blends),
        "reused_tokens": median(report["reused_tokens"] for report in blends),
        "not_blended": [report["reason"] for report in blends if not report["blended"]],
    }
    for way in WAYS:
        totals[f"{way}_seconds"] = median(one[way]["seconds"] for one in answered)
        totals[f"{way}_right"] = sum(one[way]["right"] for one in answered)
        totals[f"{way}_same"] = sum(one[way]["text"] == one["full"]["text"] for one in answered)
    return {**totals, "speedup": totals["full_seconds"] / totals["blend_seconds"]}


def _print_answered(
    console: Console, question: EvalQuestion, found: Mapping[str, Measured]
) -> None:
    title = f"[bold]{escape(question.question)}[/bold]  ({escape(question.answers[0])})"
    console.print(f"\n{title}", soft_wrap=True)
    for way, label in WAYS.items():
        record, note = found[way].record, ""
        if way == "blend":
            reused = record.chunk_tokens - record.fresh_tokens
            work = f"{reused:,} of {record.prompt_tokens:,} tokens reused"
            note = f"  [dim]{escape(record.not_blended or work)}[/dim]"
        shown = shorten(record.text, SHOWN_CHARACTERS, placeholder=" ...") or "(nothing)"
        text = f"[green]{escape(shown)}[/]" if record.holds else f"[red]{escape(shown)} *[/]"
        seconds = output.duration(record.ttft_seconds)
        console.print(f"  {label:<13} {seconds:>8}  {text}{note}", soft_wrap=True)


def _summary(told: Mapping[str, Any]) -> list[str]:
    """Return lines on the speedup and the difference of answers."""
    count = told["questions"]
    full, reuse, blend = (output.duration(told[f"{way}_seconds"]) for way in WAYS)
    return [
        f"\nFirst token, median of {count} questions: full prefill {full}, plain reuse {reuse}, "
        f"blend {blend}, [bold]{told['speedup']:.1f}x sooner[/bold]; "
        f"{told['reused_tokens']:,.0f} of {told['prompt_tokens']:,.0f} tokens reused.",
        f"Right: {told['full_right']} of {count} by full prefill, {told['reuse_right']} by plain "
        f"reuse, {told['blend_right']} by blend (* does not hold the answer in brackets, word for "
        f"word). The same text as full prefill's: {told['reuse_same']} by plain reuse, "
        f"{told['blend_same']} by blend.",
        "Plain reuse takes the passages' KV as it was stored, computed without the passages beside "
        "it; blend recomputes the tokens that need it. What full prefill gets wrong, the model "
        "gets wrong by itself.",
    ]
