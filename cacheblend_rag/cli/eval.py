"""``cacheblend-rag eval``: scores blend rules against full prefill, with their cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.quality.questions import SINGLE_HOP, choose_questions
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import EMBEDDED
from cacheblend_rag.settings.options import read_object

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend_rag.quality.dataset import EvalDataset
    from cacheblend_rag.quality.evaluator import Evaluation
    from cacheblend_rag.quality.rules import Rule
    from cacheblend_rag.quality.summary import EvalRow, FidelityRow

DEFAULT_SEED = 9_271_828


def evaluate_command(
    *,
    dataset: Annotated[
        str,
        typer.Option(help="'single-hop', or a file of questions."),
    ] = SINGLE_HOP,
    model: options.ModelOption = DEFAULT_MODEL,
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
    chunk_tokens: options.ChunkTokensOption = None,
    prompt_tokens: options.PromptTokensOption = None,
    seed: Annotated[int, typer.Option(help="Seed for whatever is drawn.")] = DEFAULT_SEED,
    ratios: Annotated[
        str | None, typer.Option(help="Recompute ratios, comma-separated.", metavar="R,R,...")
    ] = None,
    selectors: Annotated[
        str | None, typer.Option(help="Selectors, comma-separated.", metavar="NAME,NAME,...")
    ] = None,
    selector_options: Annotated[
        str,
        typer.Option(help="Options by selector, as a JSON object.", metavar='{"NAME": {...}}'),
    ] = "",
    lead_ins: Annotated[
        str | None, typer.Option(help="Lead-ins, comma-separated.", metavar="NAME,NAME,...")
    ] = None,
    check_layers: Annotated[
        str, typer.Option(help="Where hkvd compares, comma-separated.", metavar="LAYER,...")
    ] = "1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 16,
    fidelity: Annotated[
        bool,
        typer.Option("--fidelity", help="Also measure how near predictions are to full prefill's."),
    ] = False,
    ttft: Annotated[
        bool,
        typer.Option("--ttft", help="Also measure the time to first token, and prefix caching's."),
    ] = False,
    no_chat_template: Annotated[
        bool,
        typer.Option("--no-chat-template", help="Plain prompts, also for a model with a template."),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="A file of each prompt's results, as JSON lines, which is continued, or begun."
        ),
    ] = None,
    store: options.StoreOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Score full prefill, plain reuse and selectors on the same questions.

    Without --ratios, --selectors and --lead-ins, each setting gets a short table of its own;
    with any of them, every lead-in x selector x ratio. Plain reuse, full prefill and the engine's
    defaults are always included.
    """
    with output.stdout_reserved(as_json):
        options.local_model(model)
        checks.check_engine(engine)
        checks.check_installed(("rouge_score",), "Rouge-L", "eval")
        if fidelity and engine != EMBEDDED:
            raise ConfigError(f"--fidelity: only the engine {EMBEDDED!r} scores given answers")
        from cacheblend_rag.quality.records import RecordLog
        from cacheblend_rag.settings import BlendConfig

        base = BlendConfig(
            min_tokens=0,
            check_layers=options.layers(check_layers, "--check-layers"),
        )
        grid = _grid(ratios, selectors, lead_ins)
        told = _told_options(selector_options, selectors)
        by_selector = {"random": {"seed": seed}} | told
        checks.check_check_layers(base, model)
        checks.check_placement(device, dtype)
        kept = options.collection_store(store) if store else None
        log = RecordLog.resumed(resume) if resume else RecordLog()
        from cacheblend_rag.engines.model_files import load_tokenizer
        from cacheblend_rag.engines.sampling import SamplingParams
        from cacheblend_rag.quality.dataset import PromptFrame
        from cacheblend_rag.quality.evaluator import (
            Evaluator,
            evaluate_settings,
            opened_engines,
            used_lead_ins,
        )
        from cacheblend_rag.quality.measuring import Measures
        from cacheblend_rag.quality.rules import complete, default_rules

        # Loaded where it is needed first: wrong data are told before.
        loaded = cache(partial(load_tokenizer, model))
        cutting = options.cutting(
            chunk_tokens,
            prompt_tokens,
            lambda text: len(loaded().tokenize(text)),
        )
        wanted = options.names(settings or "")
        data = choose_questions(dataset, wanted, questions, passages, seed, cutting=cutting)
        plans = {
            s: complete(
                grid or default_rules(data.of_setting(s)),
                base,
                by_selector,
                fidelity=fidelity,
            )
            for s in data.settings
        }
        frame = PromptFrame.of(loaded(), data.instruction, chat_template=not no_chat_template)
        opened = opened_engines(
            engine,
            model,
            used_lead_ins(plans),
            instruction=frame.opening,
            store=kept,
            device=device,
            dtype=dtype,
        )
        with opened as engines, output.progress_bar(lines=True) as progress:
            evaluator = Evaluator(
                engines,
                frame,
                base,
                SamplingParams.greedy(max_tokens=max_tokens, stop=frame.stop),
                by_selector,
                Measures(fidelity, ttft),
                log,
                owns_store=kept is None and "://" not in engine,
            )
            first = next(iter(engines.values()))
            evaluations = evaluate_settings(
                data,
                plans,
                evaluator,
                lambda setting, count: progress.begin(setting, count).advance,
            )
            rows = _collected(evaluations)
    if as_json:
        prompts = {setting: len(data.of_setting(setting)) for setting in data.settings}
        about: dict[str, Any] = {
            "model": first.model_name,
            "dtype": first.dtype,
            "engine": first.name,
            "chat_template": frame.is_rendered,
        }
        plain = [row.to_dict() for row in rows]
        counts = {"questions": min(prompts.values()), "prompts": prompts}
        about["selector_options"] = told
        output.print_json({"dataset": data.name, **counts, **about, "rows": plain})
    else:
        print_tables(data, rows)


def _told_options(told: str, selectors: str | None) -> dict[str, dict[str, Any]]:
    """Parse ``--selector-options``: options by selector name.

    selectors: the value of ``--selectors``. Raises ConfigError for an unknown selector or option,
    and for a selector that is not among them.
    """
    example = '{"question_mid": {"layers": [9, 12]}}'
    given = read_object("--selector-options", told, example)
    named = options.names(selectors or "")
    for name, values in given.items():
        if not isinstance(values, dict):
            raise ConfigError(f"--selector-options: {name!r:.40} needs an object, as in {example}")
        checks.check_selector(name, values)
        if name not in named:
            raise ConfigError(f"--selector-options: {name!r} is not in --selectors: add it")
    return given


def _grid(ratios: str | None, selectors: str | None, lead_ins: str | None) -> list[Rule] | None:
    from cacheblend_rag.quality.rules import grid_rules

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


RULE = ("lead-in", "selector")
SCORES = ("ratio", "exact", "95 %", "F1", "Rouge-L", "recomputed", "compute")
FIDELITY = ("ratio", "compute", "first KL", "KL", "95 %", "top-1", "same", "gold", "recovered")
TTFT = ("ratio", "compute", "exact", "holds", "first token", "sooner", "95 %")
WIDE = 110
"""Least width of tables that truncate nothing."""
DEFAULT_MARK = "*"


def print_tables(data: EvalDataset, rows: Sequence[EvalRow]) -> None:
    """Print each setting's scores and, if they were measured, its fidelity and times."""
    console = output.result_console()
    for setting in data.settings:
        own = [row for row in rows if row.setting == setting]
        title = f"{data.name}, {setting}: {len(data.of_setting(setting))} questions"
        tables = [_scores(f"{title}, all in % ({DEFAULT_MARK} engine's default)", own)]
        if any(row.fidelity for row in own):
            tables.append(_fidelity(f"{title}, fidelity to full prefill", own))
        if any(row.ttft for row in own):
            tables.append(_times(f"{title}, time to first token", own))
        for table in tables:
            console.width = console.width if table is tables[0] else max(console.width, WIDE)
            console.print(table)
            console.print()


def _scores(title: str, rows: Sequence[EvalRow]) -> Table:
    table = output.table(title, RULE, SCORES)
    for row in rows:
        interval = f"{100 * row.ci95[0]:.0f}-{100 * row.ci95[1]:.0f}"
        scores = (row.f1, row.rouge_l, row.recomputed_share, row.compute_share)
        exact, *shares = (f"{100 * share:.1f}" for share in (row.exact_match, *scores))
        table.add_row(*_name(row), exact, interval, *shares)
    return table


def _times(title: str, rows: Sequence[EvalRow]) -> Table:
    table = output.table(title, RULE, TTFT)
    for row in rows:
        if row.ttft:
            low, high = row.ttft.ttft_speedup_ci95 or (row.ttft.ttft_speedup,) * 2
            table.add_row(
                *_name(row),
                f"{row.compute_share:.3f}",
                f"{row.exact_match:.3f}",
                f"{row.holds_answer:.3f}",
                output.duration(row.ttft.ttft_seconds),
                f"{row.ttft.ttft_speedup:.2f}x",
                f"{low:.2f}-{high:.2f}",
            )
    return table


def _fidelity(title: str, rows: Sequence[EvalRow]) -> Table:
    table = output.table(title, RULE, FIDELITY)
    for row in rows:
        if row.fidelity:
            table.add_row(*_name(row), f"{row.compute_share:.3f}", *_figures(row.fidelity))
    return table


def _figures(found: FidelityRow) -> tuple[str, ...]:
    low, high = found.kl_ci95
    change, recovered = found.gold_logprob_change, found.recovered_kl
    return (
        f"{found.kl_first:.4f}",
        f"{found.kl:.4f}",
        f"{low:.4f}-{high:.4f}",
        f"{found.top1:.3f}",
        f"{found.same_answer:.2f}",
        "" if change is None else f"{change:+.2f}",
        "" if recovered is None else f"{recovered:.3f}",
    )


def _name(row: EvalRow) -> tuple[str, str, str]:
    mark = DEFAULT_MARK if row.default else ""
    return row.lead_in, f"{row.selector}{mark}", f"{100 * row.ratio:g}"
