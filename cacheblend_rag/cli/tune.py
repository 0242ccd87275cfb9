"""``cacheblend-rag tune``: the cheapest settings that keep quality, as a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.models import LOCAL_MODELS
from cacheblend_rag.quality.questions import SINGLE_HOP, choose_questions
from cacheblend_rag.rag import checks

if TYPE_CHECKING:
    from cacheblend_rag.progress import ProgressCallbacks, Task
    from cacheblend_rag.quality.tune import OnRound, Tuned

SEED = 9_271_828
WIDE = 110


def tune_command(
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}, or a hub name.")],
    *,
    dataset: Annotated[
        str,
        typer.Option(help="Questions as for `eval`: a file, single-hop, ..."),
    ] = SINGLE_HOP,
    setting: Annotated[
        str | None, typer.Option(help="One setting of the dataset; all in turn by default.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="At most so many questions.")] = 40,
    chunk_tokens: options.ChunkTokensOption = None,
    prompt_tokens: options.PromptTokensOption = None,
    bar: Annotated[
        Literal["score", "fidelity"],
        typer.Option(
            help="score: F1 of answers against full prefill's; fidelity: exp(-mean KL) of "
            "predictions, which needs no right answers."
        ),
    ] = "score",
    least: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            callback=options.above_zero,
            help="The share of full prefill's quality to keep.",
        ),
    ] = 0.95,
    lead_ins: Annotated[
        str | None, typer.Option(help="Lead-ins to try.", metavar="NAME,NAME,...")
    ] = None,
    selectors: Annotated[
        str | None, typer.Option(help="Selectors to try.", metavar="NAME,NAME,...")
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Recompute ratios to try.", metavar="R,R,...")
    ] = None,
    check_layers: Annotated[
        str | None,
        typer.Option(help="Layers at which hkvd may compare.", metavar="LAYER,..."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where the profile is written; replaced if it is there.")
    ] = Path("profile.toml"),
    plot: Annotated[
        Path | None, typer.Option(help="Draw quality against time, as SVG, into this file.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep each prompt's results in this file, and go on from it."),
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Find the cheapest settings that keep full prefill's quality, and write them as a profile.

    Lead-in x selector x ratio x check layer by successive halving, in the embedded engine, with a
    store of its own. Exit code 1 if nothing keeps it, so that the model should not be blended.
    """
    with output.stdout_reserved(as_json):
        checks.check_model(model)
        checks.check_placement(device, dtype)
        needed = ("rouge_score", "tomli_w", *(("matplotlib",) if plot else ()))
        checks.check_installed(needed, "tune", "eval")
        from cacheblend_rag.engines.model_files import load_tokenizer
        from cacheblend_rag.quality import ladder
        from cacheblend_rag.quality.tune import mixed, tune_model
        from cacheblend_rag.quality.tune import plot as draw
        from cacheblend_rag.settings import BlendConfig

        at = options.layers(check_layers, "--check-layers") if check_layers else None
        if at:
            checks.check_check_layers(BlendConfig(check_layers=tuple(sorted(at))), model)
        tried: dict[str, Any] = {
            "selectors": options.names(selectors) if selectors else ladder.SELECTORS,
            "ratios": options.numbers(ratios, "--ratios") if ratios else ladder.RATIOS,
        }
        kinds = options.names(lead_ins) if lead_ins else ladder.LEAD_INS
        ladder.candidates(1, lead_ins=kinds, **tried)  # refuses what is wrong, at once
        tokenizer = load_tokenizer(model)
        cutting = options.cutting(
            chunk_tokens,
            prompt_tokens,
            lambda text: len(tokenizer.tokenize(text)),
        )
        wanted = (setting,) if setting else ()
        chosen = choose_questions(dataset, wanted, questions, None, SEED, cutting=cutting)
        with output.progress_bar(lines=True) as progress:
            tuned = tune_model(
                model,
                mixed(chosen, questions),
                bar=bar,
                least=least,
                lead_ins=kinds,
                **tried,
                check_layers=at,
                name=out.stem,
                resume=resume,
                device=device,
                dtype=dtype,
                on_round=_rounds(progress),
            )
        if tuned.profile is not None:
            tuned.profile.save(out)
        if plot is not None:
            draw(tuned, plot)
    if as_json:
        output.print_json(tuned.to_dict())
    else:
        _print(tuned, out)
    if tuned.profile is None:
        raise typer.Exit(1)


def _rounds(progress: ProgressCallbacks) -> OnRound:
    """Return a function that shows one round at a time."""
    shown: list[Task] = []

    def begin(name: str, steps: int) -> Callable[[], None]:
        while shown:
            shown.pop().end()
        shown.append(progress.begin(name, steps))
        return shown[0].advance

    return begin


def _print(tuned: Tuned, out: Path) -> None:
    what = "exp(-KL)" if tuned.bar.kind == "fidelity" else "F1 kept"
    title = f"{tuned.dataset}: {tuned.prompts} questions, {what} of {tuned.bar.least:g} wanted"
    figures = ("prompts", "kept", "95 %", "first token", "of full", "compute", "holds")
    table = output.table(title, ("settings",), figures)
    for one in tuned.standings:
        table.add_row(
            one.candidate.label,
            str(one.prompts),
            f"{one.kept.quality:.3f}",
            f"{one.kept.low:.2f}-{one.kept.high:.2f}",
            output.duration(one.ttft_seconds),
            f"{one.ttft_share:.0%}",
            f"{one.compute_share:.0%}",
            "yes" if one.holds else "",
        )
    console = output.result_console()
    console.width = max(console.width, WIDE)
    console.print(table)
    console.print(tuned.advice, style="bold", soft_wrap=True, markup=False)
    if tuned.profile is not None:
        console.print(f"written to {out}: --profile {out}", soft_wrap=True, markup=False)
