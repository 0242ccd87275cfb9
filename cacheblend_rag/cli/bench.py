"""``cacheblend-rag bench``: measures speed on this machine, on random weights or a model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from cacheblend_rag.bench.plans import (
    ENGINES,
    BatchPlan,
    ConversationPlan,
    GpuPlan,
    SteadyPlan,
    StorePlan,
    ThroughputPlan,
    TtftPlan,
)
from cacheblend_rag.cli import output
from cacheblend_rag.cli.gpu_tables import print_gpu
from cacheblend_rag.cli.plan_command import facts, measured, plan_command
from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import VLLM

if TYPE_CHECKING:
    from cacheblend_rag.bench.ttft import TtftRow

Advance = Callable[[str], None]

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


def _ttft(plan: TtftPlan, as_json: bool) -> None:
    quiet_libraries()
    if plan.engine != ENGINES[0]:
        checks.check_engine(VLLM)
    with output.stdout_reserved(as_json), output.side_console().status("starting") as status:
        if plan.engine == ENGINES[0]:
            from cacheblend_rag.bench.ttft import measure_ttft as measure
        else:
            from cacheblend_rag.bench.ttft_vllm import measure_vllm_ttft as measure
        rows = measure(plan, status.update)
    if as_json:
        plain = [row.to_dict() for row in rows]
        # The first row's fields are at the top level as well: a single figure is easy to read.
        output.print_json(plain[0] if len(plain) == 1 else {**plain[0], "rows": plain})
    else:
        _print_ttft(rows)


def _measure_store(plan: StorePlan, advance: Advance) -> dict[str, Any]:
    from cacheblend_rag.bench.store import measure_store

    return measure_store(plan, advance)


def _measure_throughput(plan: ThroughputPlan, advance: Advance) -> dict[str, Any]:
    quiet_libraries()
    checks.check_engine(VLLM)
    from cacheblend_rag.bench.throughput import measure_throughput

    return measure_throughput(plan, advance)


def _measure_steady(plan: SteadyPlan, advance: Advance) -> dict[str, Any]:
    quiet_libraries()
    from cacheblend_rag.bench.steady import measure_steady

    return measure_steady(plan, advance)


def _measure_conversation(plan: ConversationPlan, advance: Advance) -> dict[str, Any]:
    quiet_libraries()
    from cacheblend_rag.bench.conversation import measure_conversation

    return measure_conversation(plan, advance)


def _measure_batch(plan: BatchPlan, advance: Advance) -> dict[str, Any]:
    quiet_libraries()
    from cacheblend_rag.bench.batch import measure_batch

    return measure_batch(plan, advance)


def _measure_gpu(plan: GpuPlan, advance: Advance) -> dict[str, Any]:
    quiet_libraries()
    from cacheblend_rag.bench.gpu.run import measure_gpu

    is_terminal = output.side_console().is_terminal
    return measure_gpu(plan, advance if is_terminal else _line_per_step())


def _line_per_step() -> Advance:
    """Return a function that prints each new step of a label such as ``1 of 3, facts: ...``."""
    told: set[str] = set()

    def advance(label: str) -> None:
        step = label.partition(":")[0]
        if step not in told:
            told.add(step)
            output.say(step)

    return advance


def _print_batch(found: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"{found['model']}, {found['requests']} requests of {found['drawn']} chunks"
    table = Table(title=title, caption=_compared(found), caption_justify="left")
    table.add_column("order")
    for heading in ("loads", "loaded", "requests/s", "mean wait", "longest wait"):
        table.add_column(heading, justify="right")
    for row in found["orders"]:
        table.add_row(
            row["order"],
            f"{row['loads']:,}",
            f"{row['loaded_bytes'] / (1 << 20):,.1f} MiB",
            f"{row['requests_per_second']:.2f}",
            f"{row['mean_wait_groups']:.2f}",
            str(row["longest_wait_groups"]),
        )
    output.result_console().print(table)


def _compared(found: dict[str, Any]) -> str:
    return (
        f"{output.percent(found['loads_saved'])} of the loads saved, {found['speedup']:.2f}x the "
        f"requests per second; {found['same_answers']} of {found['requests']} answers are the same "
        f"in both. Waits: groups later than by arrival, at most {found['most_wait_groups']}."
    )


def _print_conversation(found: dict[str, Any]) -> None:
    for title, rows in (
        (f"{found['model']}, at most {found['prompt_tokens']:,} tokens", found["turns"]),
        ("nothing dropped", found["nothing_dropped"]),
    ):
        if rows:
            _print_turns(title, rows)


def _print_turns(title: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for heading in (
        "turn", "tokens", "earlier", "full", "prefix", "ours", "full/ours", "prefix/ours", "KL",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["turn"]),
            f"{row['prompt_tokens']:,}",
            str(row["earlier_turns"]),
            output.duration(row["full_seconds"]),
            output.duration(row["prefix_seconds"]),
            output.duration(row["ours_seconds"]),
            f"{row['full_over_ours']:.2f}x",
            f"{row['prefix_over_ours']:.2f}x",
            f"{row['mean_kl']:.4f}",
        )
    output.result_console().print(table)


def _print_ttft(rows: Sequence[TtftRow]) -> None:
    from rich.table import Table

    first = rows[0]
    title = f"{first.model or first.shape}, {first.prompt_tokens:,} tokens, "
    title += f"{first.engine}, {first.selector}"
    title += "" if first.precision == "native" else f", stored in {first.precision}"
    table = Table(title=title)
    table.add_column("KV from")
    vllm = first.prefix_caching_seconds is not None
    last = "prefix caching" if vllm else "extra memory"
    for heading in (
        "ratio", "full prefill", "blend", "speedup", "bound", "of the bound", "load hidden", last,
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.tier,
            f"{row.ratio:g}",
            output.duration(row.full_seconds),
            output.duration(row.blend_seconds),
            f"{row.speedup:.2f}x",
            f"{row.bound:.2f}x",
            output.percent(row.share_of_bound),
            "" if row.hidden_share is None else output.percent(row.hidden_share),
            output.duration(row.prefix_caching_seconds or 0.0) if vllm else _memory(row),
        )
    output.result_console().print(table)


def _memory(row: TtftRow) -> str:
    if row.peak_extra_bytes is None:
        return "not measured"
    return f"{row.peak_extra_bytes / row.prompt_kv_bytes:.2f}x prompt KV"


def _print_steady(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['shape']}, {found['prompt_tokens']:,} tokens per prompt")
    table.add_column("requests")
    for heading in ("full prefill", "blend", "speedup", "from memory"):
        table.add_column(heading, justify="right")
    until = 0
    for row in found["hundreds"]:
        until += row["requests"]
        table.add_row(
            f"up to {until:,}",
            output.duration(row["full_seconds"]),
            output.duration(row["blend_seconds"]),
            f"{row['speedup']:.2f}x",
            output.percent(row["hit_share"]),
        )
    output.result_console().print(table)


def print_store(found: dict[str, Any]) -> None:
    """Print the results of `measure_store`."""
    from rich.table import Table

    table = Table(title="GiB per second, and the share of the raw limit")
    table.add_column("tier")
    for heading in ("get", "raw get", "share", "put", "raw put", "share"):
        table.add_column(heading, justify="right")
    for row in found["tiers"]:
        cells = [row["tier"]]
        for way in ("get", "put"):
            speed, limit = row[f"{way}_gib_s"], row[f"raw_{way}_gib_s"]
            cells += [f"{speed:.2f}", f"{limit:.2f}", output.percent(speed / limit)]
        table.add_row(*cells)
    output.result_console().print(table)


def _add(name: str, plan: type[Any], run: Callable[[Any, bool], None], about: str) -> None:
    bench_app.command(name)(plan_command(plan, run, about))


_add(
    "ttft",
    TtftPlan,
    _ttft,
    "Time to first token of ordinary prefill and of a blend, on random weights of a real shape, or "
    "on a model's own weights and real text (--model)."
    "\n\nWith vLLM, its own prefix caching is measured, too, on the chunks in another order.",
)
_add(
    "throughput",
    ThroughputPlan,
    partial(measured, _measure_throughput, facts("throughput in vLLM")),
    "Questions per second in vLLM: blended, plain, and with vLLM's own prefix caching.",
)
_add(
    "store",
    StorePlan,
    partial(measured, _measure_store, print_store),
    "Speed of writing and reading chunk KV in each tier, and the raw limit of this machine.",
)
_add(
    "steady",
    SteadyPlan,
    partial(measured, _measure_steady, _print_steady),
    "Speedup and hit share per hundred requests, from a store larger than memory.",
)
_add(
    "conversation",
    ConversationPlan,
    partial(measured, _measure_conversation, _print_conversation),
    "Time to first token in each turn of a conversation, by full prefill, by prefix caching, and "
    "with the KV of passages and earlier turns; and how near the answers are.",
)
_add(
    "batch",
    BatchPlan,
    partial(measured, _measure_batch, _print_batch),
    "Loads from disk and requests per second of a batch, in groups that share chunks and first "
    "come, first served.",
)
_add(
    "gpu",
    GpuPlan,
    partial(measured, _measure_gpu, print_gpu),
    "What decides on a GPU how much sooner blends are, in steps of less than nine minutes in all."
    "\n\nEach step runs in a process of its own, with its own limit; the file holds what was "
    "measured so far.",
)
