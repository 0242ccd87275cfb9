"""``cacheblend-rag eval``: scores blend rules against full prefill, with their cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.models import DEMO_MODEL
from cacheblend_rag.quality.dataset import EvalDataset, lead_text
from cacheblend_rag.quality.questions import DEMO, choose_questions
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend_rag.quality.evaluator import EvalRow, Evaluation, Rule

DEFAULT_SEED = 9_271_828


def evaluate_command(
    *,
    dataset: Annotated[
        str, typer.Option(help="'demo' or a JSON file of questions with passages or documents.")
    ] = DEMO,
    model: options.ModelOption = DEMO_MODEL,
    engine: Annotated[
        str,
        typer.Option(help="'transformers', 'vllm' (starts a server) or the URL of a `serve`."),
    ] = EMBEDDED,
    settings: Annotated[
        str | None, typer.Option(help="Comma-separated settings; all of the dataset's by default.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Most questions per setting.")] = 500,
    passages: Annotated[
        int | None,
        typer.Option(min=1, help="Most passages per question; all by default."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed for drawing the demo's questions.")
    ] = DEFAULT_SEED,
    ratios: Annotated[
        str | None, typer.Option(help="Recompute ratios, comma-separated.", metavar="R,R,...")
    ] = None,
    selectors: Annotated[
        str | None, typer.Option(help="Selectors, comma-separated.", metavar="NAME,NAME,...")
    ] = None,
    lead_ins: Annotated[
        str | None, typer.Option(help="Lead-ins, comma-separated.", metavar="NAME,NAME,...")
    ] = None,
    deviation: Annotated[str, typer.Option(help="What hkvd compares: v, k or kv.")] = "v",
    check_layers: Annotated[
        str, typer.Option(help="Where hkvd compares, comma-separated.", metavar="LAYER,...")
    ] = "1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 16,
    store: options.StoreOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Score full prefill, plain reuse and selectors on the same questions.

    Without --ratios, --selectors and --lead-ins, each setting gets a short table of its own;
    with any of them, every lead-in x selector x ratio. Plain reuse and full prefill are always
    included.
    """
    with output.stdout_reserved(as_json):
        options.local_model(model)
        checks.check_engine(engine)
        checks.check_installed(("rouge_score",), "Rouge-L", "eval")
        from cacheblend_rag.settings import BlendConfig

        base = BlendConfig(
            min_tokens=0, check_layers=options.layers(check_layers, "--check-layers")
        )
        grid = _grid(ratios, selectors, lead_ins)
        checks.check_selector("hkvd", {"deviation": deviation})
        checks.check_check_layers(base, model)
        checks.check_placement(device, dtype)
        kept = options.collection_store(store) if store else None
        from cacheblend_rag.engines.sampling import SamplingParams
        from cacheblend_rag.quality.engines import opened_engines
        from cacheblend_rag.quality.evaluator import evaluate_settings, used_lead_ins
        from cacheblend_rag.quality.grids import default_rules

        wanted = options.names(settings or "")
        data = choose_questions(dataset, wanted, questions, passages, seed)
        plans = {s: grid or default_rules(s, data.of_setting(s)) for s in data.settings}
        opened = opened_engines(
            engine,
            model,
            used_lead_ins(plans),
            instruction=lead_text(data.instruction),
            store=kept,
            device=device,
            dtype=dtype,
        )
        sampling = SamplingParams.greedy(max_tokens=max_tokens, stop=("\n",))
        selector_options: dict[str, dict[str, Any]] = {
            "hkvd": {"deviation": deviation},
            "random": {"seed": seed},
        }
        with opened as engines, output.progress_bar() as progress:
            evaluations = evaluate_settings(
                data,
                plans,
                engines,
                base=base,
                sampling=sampling,
                options=selector_options,
                on_setting=lambda setting, count: progress.begin(setting, count).advance,
            )
            rows = _collected(evaluations)
    if as_json:
        count = min(len(data.of_setting(setting)) for setting in data.settings)
        plain = [row.to_dict() for row in rows]
        output.print_json({"dataset": data.name, "questions": count, "rows": plain})
    else:
        _print_table(data, rows)


def _grid(ratios: str | None, selectors: str | None, lead_ins: str | None) -> list[Rule] | None:
    from cacheblend_rag.quality.grids import grid_rules

    return grid_rules(
        None if ratios is None else options.numbers(ratios, "--ratios"),
        None if selectors is None else options.names(selectors),
        None if lead_ins is None else options.names(lead_ins),
    )


def _collected(evaluations: Iterable[tuple[str, Evaluation]]) -> list[EvalRow]:
    """Return all settings' rows, and warn about answers that were not blended."""
    rows: list[EvalRow] = []
    for setting, found in evaluations:
        rows += found.rows
        for reason, count in found.not_blended.items():
            output.warn(f"{setting}: {count} answers came from ordinary prefill ({reason})")
    return rows


def _print_table(data: EvalDataset, rows: Sequence[EvalRow]) -> None:
    console = output.result_console()
    for setting in data.settings:
        count = len(data.of_setting(setting))
        console.print(_table(f"{data.name}, {setting}: {count} questions, all in %", setting, rows))
        console.print()


def _table(title: str, setting: str, rows: Sequence[EvalRow]) -> Table:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for heading in ("lead-in", "selector"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ratio", "exact", "95 %", "F1", "Rouge-L", "recomputed", "compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.setting == setting:
            interval = f"{100 * row.ci95[0]:.0f}-{100 * row.ci95[1]:.0f}"
            scores = (row.f1, row.rouge_l, row.recomputed_share, row.compute_share)
            exact, *shares = (f"{100 * share:.1f}" for share in (row.exact_match, *scores))
            ratio = f"{100 * row.ratio:g}"
            table.add_row(row.lead_in, row.selector, ratio, exact, interval, *shares)
    return table
