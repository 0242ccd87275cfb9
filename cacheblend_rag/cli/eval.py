"""``cacheblend-rag eval``: quality and cost of blend rules against full prefill, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cacheblend_rag.cli import models, output
from cacheblend_rag.config import BlendConfig, LeadIn
from cacheblend_rag.engines.factory import EMBEDDED
from cacheblend_rag.engines.naming import DEMO_MODEL
from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.rag import checks

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend_rag.demo.corpus import DemoPrompt
    from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
    from cacheblend_rag.quality.evaluator import EvalRow, Rule

DEMO = "demo"
DEFAULT_SEED = 9_271_828
DEFAULT_RATIOS = (0.05, 0.1, 0.15)
DEFAULT_SELECTORS = ("hkvd", "prior", "random")
DEFAULT_LEAD_INS: tuple[LeadIn, ...] = ("instruction", "document")

PlanCell = tuple[LeadIn, str, tuple[float, ...]]
_WHOLE_DOCUMENTS: tuple[PlanCell, ...] = (
    ("instruction", "hkvd", (0.15,)),
    ("instruction", "prior", (0.05, 0.1, 0.15, 0.2, 0.25)),
    ("instruction", "question", (0.2,)),
    ("instruction", "question_prior", (0.1, 0.2)),
    ("instruction", "chunk_head", (0.15,)),
    ("instruction", "random", (0.05, 0.1, 0.15, 0.2, 0.25)),
    ("document", "hkvd", (0.15,)),
    ("document", "prior", (0.15,)),
)
_BROKEN_DOCUMENTS: tuple[PlanCell, ...] = (
    ("instruction", "hkvd", (0.15,)),
    ("instruction", "prior", (0.15,)),
    ("instruction", "random", (0.15,)),
    ("document", "hkvd", (0.15,)),
    ("document", "prior", (0.15,)),
)
_SINGLE_PASSAGES: tuple[PlanCell, ...] = (
    ("instruction", "hkvd", (0.05, 0.1, 0.15)),
    ("instruction", "question", (0.15,)),
    ("instruction", "chunk_head", (0.15,)),
    ("instruction", "random", (0.15,)),
)


def evaluate_command(
    *,
    dataset: Annotated[
        str, typer.Option(help="'demo' or a JSON file of questions with passages or documents.")
    ] = DEMO,
    model: models.ModelOption = DEMO_MODEL,
    engine: Annotated[
        str,
        typer.Option(
            help="'transformers', 'vllm' (a server that runs meanwhile) or the URL of a `serve`."
        ),
    ] = EMBEDDED,
    settings: Annotated[
        str | None, typer.Option(help="Comma-separated settings; all of the dataset's by default.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions a setting, at most.")] = 500,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Passages a question, at most; all by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the demo's questions.")] = DEFAULT_SEED,
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
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer, at most.")] = 16,
    device: models.DeviceOption = None,
    dtype: models.DtypeOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Score full prefill, plain reuse and selectors on the same questions.

    Without --ratios, --selectors and --lead-ins, a short table fit for each setting is made;
    with any of them, every lead-in x selector x ratio. Plain reuse and full prefill are always in.
    """
    with output.stdout_reserved(as_json):
        models.model_folder(model)
        checks.check_engine(engine)
        base = BlendConfig(min_tokens=0, check_layers=output.layers(check_layers, "--check-layers"))
        grid = grid_rules(ratios, selectors, lead_ins)
        checks.check_selector("hkvd", {"deviation": deviation})
        checks.check_check_layers(base, model)
        checks.check_placement(device, dtype)
        data = _load(dataset, settings, questions, passages, seed)
        plans = {s: grid or default_rules(s, data.of_setting(s)) for s in data.settings}
        options: dict[str, dict[str, Any]] = {
            "hkvd": {"deviation": deviation},
            "random": {"seed": seed},
        }
        rows = _run(
            data,
            plans,
            engine=engine,
            model=model,
            base=base,
            options=options,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
        )
    if as_json:
        count = min(len(data.of_setting(setting)) for setting in data.settings)
        plain = [row.to_dict() for row in rows]
        output.print_json({"dataset": data.name, "questions": count, "rows": plain})
    else:
        _print_table(data, rows)


def demo_dataset(settings: Sequence[str], questions: int, seed: int) -> EvalDataset:
    """Draw questions about held-out subjects of the demo's corpus, so many a setting."""
    from cacheblend_rag.demo.corpus import INSTRUCTION, SETTINGS, generate_prompts
    from cacheblend_rag.quality.dataset import EvalDataset

    for setting in settings:
        if setting not in SETTINGS:
            raise ConfigError(f"setting={setting!r} must be one of {', '.join(SETTINGS)}")
    drawn = tuple(
        _demo_question(prompt)
        for setting in settings or SETTINGS
        for prompt in generate_prompts(setting, questions, seed)
    )
    return EvalDataset(DEMO, drawn, INSTRUCTION)


def _demo_question(prompt: DemoPrompt) -> EvalQuestion:
    from cacheblend_rag.demo.corpus import CHUNK_SEPARATOR
    from cacheblend_rag.quality.dataset import EvalQuestion
    from cacheblend_rag.text.chunk import Document

    documents = tuple(
        Document(document.document_id, document.chunks, CHUNK_SEPARATOR)
        for document in prompt.documents
    )
    chunks = [document.to_chunks() for document in documents]
    return EvalQuestion(
        question=prompt.question.question,
        answers=(prompt.question.answer,),
        passages=tuple(chunks[d][c] for d, c in prompt.retrieved),
        documents=documents,
        setting=prompt.setting,
        kind=prompt.question.kind,
    )


def _load(
    dataset: str, settings: str | None, questions: int, passages: int | None, seed: int
) -> EvalDataset:
    from cacheblend_rag.quality.dataset import EvalDataset, load_dataset

    wanted = output.names(settings or "")
    demo = dataset == DEMO
    data = demo_dataset(wanted, questions, seed) if demo else load_dataset(Path(dataset))
    for setting in wanted:
        if setting not in data.settings:
            raise DatasetError(f"{dataset}: setting {setting!r} is none of {data.settings}")
    chosen = tuple(
        question.first_passages(passages) if passages else question
        for setting in wanted or data.settings
        for question in data.of_setting(setting)[:questions]
    )
    return EvalDataset(data.name, chosen, data.instruction)


def grid_rules(
    ratios: str | None, selectors: str | None, lead_ins: str | None
) -> list[Rule] | None:
    """Return every lead-in x selector x ratio, or None when no option asks for a grid.

    Plain reuse stands first for each lead-in. Raises ConfigError on an unknown name.
    """
    if ratios is None and selectors is None and lead_ins is None:
        return None
    chosen_ratios = output.numbers(ratios, "--ratios") if ratios else DEFAULT_RATIOS
    for ratio in chosen_ratios:
        BlendConfig(recompute_ratio=ratio)
    chosen_selectors = output.names(selectors) if selectors else DEFAULT_SELECTORS
    return _rules(
        [
            (lead_in, selector, chosen_ratios)
            for lead_in in (_lead_ins(lead_ins) if lead_ins else DEFAULT_LEAD_INS)
            for selector in chosen_selectors
        ]
    )


def default_rules(setting: str, questions: Sequence[EvalQuestion]) -> list[Rule]:
    """Return the short table that fits a setting; plain reuse stands first for each lead-in."""
    if all(len(d.chunks) == 1 for question in questions for d in question.documents):
        return _rules(_SINGLE_PASSAGES)
    broken = setting in ("fragments", "shuffled")
    return _rules(_BROKEN_DOCUMENTS if broken else _WHOLE_DOCUMENTS)


def _rules(cells: Sequence[PlanCell]) -> list[Rule]:
    from cacheblend_rag.blend.selectors import make_selector
    from cacheblend_rag.quality.evaluator import Rule

    rules: dict[Rule, None] = {}
    for lead_in, selector, ratios in cells:
        make_selector(selector)
        rules[Rule.reuse(lead_in)] = None
        for ratio in ratios:
            if ratio > 0 and selector != "none":
                rules[Rule(lead_in, selector, ratio)] = None
    return list(rules)


def _lead_ins(text: str) -> tuple[LeadIn, ...]:
    known = {str(name): name for name in get_args(LeadIn)}
    for name in output.names(text):
        if name not in known:
            raise ConfigError(f"lead_in={name!r} must be one of {', '.join(known)}")
    return tuple(known[name] for name in output.names(text))


def _run(
    data: EvalDataset,
    plans: dict[str, list[Rule]],
    *,
    engine: str,
    model: str,
    base: BlendConfig,
    options: dict[str, dict[str, Any]],
    max_tokens: int,
    device: str | None,
    dtype: str | None,
) -> list[EvalRow]:
    from cacheblend_rag.engines.base import SamplingParams
    from cacheblend_rag.quality.dataset import lead_text
    from cacheblend_rag.quality.evaluator import Evaluator

    used = dict.fromkeys(rule.lead_in for rules in plans.values() for rule in rules)
    opened = models.opened_engines(
        engine,
        model,
        list(used),
        instruction=lead_text(data.instruction),
        device=device,
        dtype=dtype,
    )
    sampling = SamplingParams(max_tokens=max_tokens, stop=("\n",))
    rows: list[EvalRow] = []
    with opened as engines, output.progress_bar() as progress:
        for setting, rules in plans.items():
            questions = data.of_setting(setting)
            task = progress.begin(setting, len(questions))
            needed = {rule.lead_in: engines[rule.lead_in] for rule in rules}
            evaluator = Evaluator(needed, data.instruction, base, sampling, options)
            found = evaluator.run(questions, rules, task.advance)
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
