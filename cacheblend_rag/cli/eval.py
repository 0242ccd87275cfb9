"""``cacheblend-rag eval``: scores blend rules against full prefill, with their cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import named_settings, options, output
from cacheblend_rag.demo.passages import SINGLE_HOP
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend_rag.quality.evaluate import Row

FIGURES = (
    "ratio", "compute", "read first", "KL", "top-1", "same", "F1", "holds", "recovered", "of F1",
    "first token", "sooner",
)  # fmt: skip
WIDE = 130
"""Least width of a table that truncates nothing."""


def evaluate_command(
    *,
    dataset: Annotated[
        str, typer.Option(help="'single-hop', or a file of questions.")
    ] = SINGLE_HOP,
    model: options.ModelOption = DEFAULT_MODEL,
    engine: Annotated[
        str,
        typer.Option(help="'transformers', 'vllm' or the URL of a `serve`."),
    ] = EMBEDDED,
    questions: Annotated[int, typer.Option(min=1, help="Most questions per setting.")] = 500,
    rules: Annotated[
        str,
        typer.Option(
            metavar="SELECTOR=RATIO,...",
            help="Selectors and the share of tokens that each recomputes.",
        ),
    ] = "hkvd=0.15",
    resume: Annotated[
        Path | None,
        typer.Option(
            help="A file of each prompt's results, as JSON lines, which is continued, or begun."
        ),
    ] = None,
    settings: named_settings.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Score full prefill, plain reuse, random rows, selectors and your settings on questions.

    Beside answers: how near predictions are to full prefill's, and the time to first token.
    """
    with output.stdout_reserved(as_json):
        options.local_model(model)
        checks.check_engine(engine)
        from cacheblend_rag.quality.questions import QuestionSettings, choose_questions

        asked, given = named_settings.split(settings, QuestionSettings)
        config = named_settings.engine_config(given, engine=engine, model=model)
        checks.check_placement(config.device, config.dtype)
        from cacheblend_rag.engines.model_files import load_tokenizer
        from cacheblend_rag.quality.dataset import PromptFrame
        from cacheblend_rag.quality.evaluate import beside, evaluate, opened, read_rules
        from cacheblend_rag.quality.measure import RecordLog

        blend, lead_in = config.blend, config.lead_in.kind
        checks.check_check_layers(blend, model)
        wanted = read_rules(rules, blend, lead_in)
        log = RecordLog.resumed(resume) if resume else None
        data = choose_questions(dataset, questions, asked.settings)
        frame = PromptFrame.of(load_tokenizer(model), str(config.instruction) or data.instruction)
        config = config.with_changes(instruction=frame.opening)
        with opened(config) as first, output.progress_bar(lines=True) as progress:
            told = beside(wanted, blend, lead_in, exact=first.dtype in (None, "float32"))
            rows = evaluate(
                first,
                frame,
                data,
                told,
                max_tokens=asked.max_tokens,
                log=log,
                on_question=progress.begin(data.name, len(data.questions)).advance,
            )
    for row in rows:
        for reason, count in (row.not_blended or {}).items():
            what = f"{row.setting}, {row.selector} {row.ratio:g}"
            output.warn(f"{what}: {count} answers came from ordinary prefill ({reason})")
    if as_json:
        output.print_json(
            {
                "dataset": data.name,
                "prompts": {one: len(data.of_setting(one)) for one in data.settings},
                "model": first.model_name,
                "dtype": first.dtype,
                "engine": first.name,
                "chat_template": frame.is_rendered,
                "rows": [row.to_dict() for row in rows],
            }
        )
        return
    console = output.result_console()
    console.width = max(console.width, WIDE)
    for setting in data.settings:
        title = f"{data.name}, {setting}: {len(data.of_setting(setting))} questions"
        shown = [row for row in rows if row.setting == setting]
        console.print(_table(f"{title} (* the settings in force)", shown))


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = output.table(title, ("lead-in", "selector"), FIGURES)
    for row in rows:
        table.add_row(
            row.lead_in,
            f"{row.selector}{'*' if row.default else ''}",
            f"{row.ratio:g}",
            f"{row.compute_share:.3f}",
            f"{row.early_kv_bytes / 1e6:.0f} MB",
            f"{row.kl:.4f}",
            f"{row.top1:.3f}",
            f"{row.same_answer:.2f}",
            f"{row.f1:.3f}",
            f"{row.holds_answer:.3f}",
            f"{row.recovered_logprob:.3f}",
            f"{row.recovered_f1:.3f}",
            output.duration(row.ttft_seconds),
            f"{row.ttft_speedup:.2f}x",
        )
    return table
