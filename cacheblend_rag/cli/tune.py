"""``cacheblend-rag tune``: the cheapest settings that keep quality, as a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import named_settings, options, output
from cacheblend_rag.demo.passages import SINGLE_HOP
from cacheblend_rag.models import LOCAL_MODELS
from cacheblend_rag.rag import checks

if TYPE_CHECKING:
    from cacheblend_rag.quality.tune import Tuned

WIDE = 110


def tune_command(
    model: Annotated[str, typer.Argument(help=f"{LOCAL_MODELS}, or a hub name.")],
    *,
    dataset: Annotated[str, typer.Option(help="Questions, as for `eval`.")] = SINGLE_HOP,
    questions: Annotated[int, typer.Option(min=1, help="At most so many questions.")] = 40,
    bar: Annotated[
        str,
        typer.Option(
            metavar="KIND[=SHARE]",
            help="What to keep, 0.95 by default: recovered is the share of what passages add to "
            "right answers' probability, fidelity is exp(-mean KL) and needs no right answers.",
        ),
    ] = "recovered",
    rules: Annotated[
        str, typer.Option(metavar="SELECTOR=RATIO,...", help="What to try; a fixed grid if empty.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Where the profile is written; replaced if it is there.")
    ] = Path("profile.toml"),
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep each prompt's results in this file, and go on from it."),
    ] = None,
    settings: named_settings.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Find the cheapest settings that keep full prefill's quality, and write them as a profile.

    Exit code 1 if nothing keeps it, so that the model should not be blended.
    """
    with output.stdout_reserved(as_json):
        checks.check_model(model)
        from cacheblend_rag.quality.questions import QuestionSettings, choose_questions

        asked, given = named_settings.split(settings, QuestionSettings)
        config = named_settings.engine_config(given, engine=None, model=None)
        checks.check_placement(config.device, config.dtype)
        from cacheblend_rag.quality import tune
        from cacheblend_rag.quality.evaluate import read_rules

        tune.Bar.read(bar)
        read_rules(rules, config.blend, config.lead_in.kind)
        data = choose_questions(dataset, questions, asked.settings)
        data = tune.mixed(data, questions)
        with output.progress_bar(lines=True) as progress:
            tuned = tune.tune_model(
                model,
                data,
                bar=bar,
                rules=rules,
                name=out.stem,
                max_tokens=asked.max_tokens,
                resume=resume,
                on_prompt=progress.begin(f"tuning {model}", len(data.questions)).advance,
                config=config,
            )
        if tuned.profile is not None:
            tuned.profile.save(out)
    if as_json:
        output.print_json(tuned.to_dict())
    else:
        _print(tuned, out)
    if tuned.profile is None:
        raise typer.Exit(1)


def _print(tuned: Tuned, out: Path) -> None:
    what = "exp(-KL)" if tuned.bar.kind == "fidelity" else "F1 kept"
    title = f"{tuned.dataset}: {tuned.prompts} questions, {what} of {tuned.bar.least:g} wanted"
    figures = ("kept", "95 %", "first token", "sooner", "compute", "holds")
    table = output.table(title, ("settings",), figures)
    for one in tuned.tried:
        table.add_row(
            one.rule.name,
            f"{one.kept:.3f}",
            one.kept.between(".2f"),
            output.duration(one.row.ttft_seconds),
            f"{one.row.ttft_speedup:.2f}x",
            f"{one.row.compute_share:.0%}",
            "yes" if one.holds else "",
        )
    console = output.result_console()
    console.width = max(console.width, WIDE)
    console.print(table)
    console.print(tuned.advice, style="bold", soft_wrap=True, markup=False)
    if tuned.profile is not None:
        console.print(f"written to {out}: --set profile={out}", soft_wrap=True, markup=False)
