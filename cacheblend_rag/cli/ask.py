"""``cacheblend-rag ask``: answers one question, and prints sources and report."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.errors import PromptError
from cacheblend_rag.rag.answering import Asker, clean_question, finished
from cacheblend_rag.rag.collection import DEFAULT_FOLDER
from cacheblend_rag.rag.collection_engine import Placement
from cacheblend_rag.rag.fitting import FittedPrompt
from cacheblend_rag.rag.ordering import PassageOrder

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.sampling import SamplingParams


def ask_command(
    question: Annotated[list[str], typer.Argument(metavar="QUESTION", help="The question.")],
    *,
    folder: asking.FromOption = DEFAULT_FOLDER,
    top_k: asking.TopKOption = asking.TOP_K,
    max_tokens: options.MaxTokensOption = asking.MAX_TOKENS,
    temperature: options.TemperatureOption = None,
    top_p: options.TopPOption = None,
    sampling_top_k: options.SamplingTopKOption = None,
    min_p: options.MinPOption = None,
    repetition_penalty: options.RepetitionPenaltyOption = None,
    seed: options.SeedOption = None,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    profile: options.ProfileOption = None,
    order: asking.OrderOption = PassageOrder.SCORE,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer by full prefill, and compare.")
    ] = False,
    engine: options.EngineOption = None,
    device: options.DeviceOption = None,
    store: options.StoreOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Answer a question from a collection, reusing the stored KV of its passages."""
    text = clean_question(_one(question))
    asked = options.sampling_settings(
        max_tokens,
        greedy=compare,
        temperature=temperature,
        top_p=top_p,
        top_k=sampling_top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    placement = Placement(device, options.collection_store(store), profile=profile)
    # Full prefill uses no cached prefix, so the blend that is compared with it does not either.
    prefix = False if compare else None
    with (
        output.stdout_reserved(as_json),
        asking.opened(folder, placement, engine, ratio, selector, reuse_prefix=prefix) as asker,
    ):
        sampling = asker.stopping(asked)
        sources = asker.retrieve(text, top_k, order)
        fitted = asker.fit((), text, sources, max_tokens)
        left_out = len(sources) - len(fitted.sources)
        if left_out:
            output.warn(f"{left_out} of {len(sources)} passages left out: no room in the prompt")
        if compare:
            _warm_up(asker, fitted, replace(sampling, max_tokens=1))
        answer = _answer(asker, fitted, sampling, shown=not as_json, titled=compare)
        full = asker.engine.generate_full(fitted.prepared, sampling) if compare else None
    if as_json:
        output.print_json(_plain(text, fitted, answer, full))
        return
    if full:
        typer.echo(f"\nfull prefill:\n{output.printable(full.text).strip()}")
    typer.echo("\nsources:")
    asking.print_sources(fitted.sources)
    typer.echo("\nreport:")
    asking.print_report(answer.report)
    if full:
        _print_comparison(answer, full)


def _one(words: list[str]) -> str:
    """Return the question; raises PromptError when the shell has split it into words."""
    if len(words) > 1:
        raise PromptError(f'the question must stand in quotes: ask "{" ".join(words)}"')
    return words[0]


def _warm_up(asker: Asker, fitted: FittedPrompt, sampling: SamplingParams) -> None:
    """Answer once both ways, untimed, so that no timing includes first-request costs."""
    finished(asker.stream(fitted, sampling))
    asker.engine.generate_full(fitted.prepared, sampling)


def _answer(
    asker: Asker, fitted: FittedPrompt, sampling: SamplingParams, *, shown: bool, titled: bool
) -> Generation:
    deltas = asker.stream(fitted, sampling)
    if not shown:
        return finished(deltas)
    if titled:
        typer.echo("blend:")
    return finished(asking.written(deltas))


def _print_comparison(answer: Generation, full: Generation) -> None:
    blended, ordinary = _first_token(answer), _first_token(full)
    typer.echo(
        f"\nfirst token: blend {output.duration(blended)}, full prefill "
        f"{output.duration(ordinary)}, {ordinary / blended:.1f}x sooner"
    )


def _plain(
    question: str, fitted: FittedPrompt, answer: Generation, full: Generation | None
) -> dict[str, Any]:
    """Return plain JSON values."""
    plain = {
        "question": question,
        **_plain_answer(answer),
        "sources": [source.to_dict() for source in fitted.sources],
    }
    if full:
        plain["full"] = _plain_answer(full)
        plain["speedup"] = _first_token(full) / _first_token(answer)
    return plain


def _plain_answer(generation: Generation) -> dict[str, Any]:
    return {
        "answer": generation.text.strip(),
        "finish_reason": generation.finish_reason,
        "sampling": asdict(generation.sampling),
        "report": generation.report.to_dict(),
    }


def _first_token(generation: Generation) -> float:
    return generation.report.seconds.time_to_first_token
