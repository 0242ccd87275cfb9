"""``cacheblend-rag bench``: measures speed on this machine, on random weights or a model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cacheblend_rag.bench.plans import (
    DEFAULT_SHAPE,
    ENGINES,
    OPTIONS,
    TIERS,
    TtftPlan,
)
from cacheblend_rag.cli import options, output
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import VLLM, Precision

if TYPE_CHECKING:
    from cacheblend_rag.bench.ttft import TtftRow

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
TiersOption = Annotated[
    list[str],
    typer.Option(
        "--tier", help="host, disk or a tier's URL, such as redis://cache:6379/0; repeatable."
    ),
]
RepeatOption = Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")]


@bench_app.command("ttft")
def ttft_command(
    *,
    shape: Annotated[
        str,
        typer.Option(
            help="Of random weights: smollm2-135m, smollm2-360m, qwen2.5-0.5b, llama-3.2-1b, "
            f"mistral-7b, llama-3.1-8b. {DEFAULT_SHAPE} by default."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="In place of a shape: a model's own weights, on real text. smollm2, a folder, a "
            "GGUF file or a hub name."
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, mps, ...; vLLM runs on what it was built for.")
    ] = "cpu",
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")] = ENGINES[0],
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens a chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens behind the chunks.")] = 32,
    selector: Annotated[str, typer.Option(help="The selector.")] = "hkvd",
    selector_options: Annotated[
        str, typer.Option(help=f"Its options, as a JSON object, such as {OPTIONS}.")
    ] = "",
    check_layers: Annotated[
        str, typer.Option(help="Where hkvd compares, separated by commas.")
    ] = "1",
    ratio: Annotated[list[float], typer.Option(help="Recompute ratio; repeatable.")] = [0.15],  # noqa: B006
    tier: TiersOption = list(TIERS),  # noqa: B006
    repeat: RepeatOption = 5,
    batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens vLLM computes in a step; whole prompts by default."),
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="vLLM without compiling the model.")
    ] = False,
    precision: Annotated[str, typer.Option(help="Of stored chunk KV: native or fp8.")] = "native",
    as_json: options.JsonOption = False,
) -> None:
    """Measure the time to first token by ordinary prefill and by a blend.

    On random weights of a real shape, or on a model's own weights and real text (--model). With
    vLLM, its own prefix caching is measured, too, on the chunks in another order.
    """
    checks.check_placement(None, dtype)
    checks.check_blend(None, selector)
    if model:
        quiet_libraries()
        checks.check_model(model)
    plan = TtftPlan(
        shape=shape,
        model=model,
        dtype=dtype,
        device=device,
        engine=engine,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        selector=selector,
        selector_options=selector_options,
        check_layers=options.layers(check_layers, "--check-layers"),
        ratios=tuple(dict.fromkeys(ratio)),
        tiers=tuple(dict.fromkeys(tier)),
        repeat=repeat,
        batched_tokens=batched_tokens,
        eager=eager,
        precision=cast("Precision", precision),
    )
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


@bench_app.command("store")
def store_command(
    *,
    chunk_mib: Annotated[int, typer.Option(min=1, help="Size of the chunk KV moved.")] = 64,
    repeat: RepeatOption = 7,
    tier: TiersOption = list(TIERS),  # noqa: B006
    as_json: options.JsonOption = False,
) -> None:
    """Measure how fast each tier writes and reads chunk KV, beside this machine's raw speed."""
    with output.stdout_reserved(as_json), output.side_console().status("starting") as status:
        from cacheblend_rag.bench.store import measure_store

        found = measure_store(tier, chunk_mib, repeat, status.update)
    (output.print_json if as_json else _print_store)(found)


def _print_ttft(rows: Sequence[TtftRow]) -> None:
    first = rows[0]
    title = f"{first.model or first.shape}, {first.prompt_tokens:,} tokens, "
    title += f"{first.engine}, {first.selector}"
    title += "" if first.precision == "native" else f", stored in {first.precision}"
    vllm = first.prefix_caching_seconds is not None
    figures = ("ratio", "full prefill", "blend", "speedup", "bound", "of the bound", "load hidden")
    last = "prefix caching" if vllm else "extra memory"
    table = output.table(title, ("KV from",), (*figures, last))
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


def _print_store(found: dict[str, Any]) -> None:
    """Print the results of `measure_store`."""
    figures = ("get", "raw get", "share", "put", "raw put", "share")
    title = "GiB per second, and the share of the raw limit"
    table = output.table(title, ("tier",), figures)
    for row in found["tiers"]:
        cells = [row["tier"]]
        for way in ("get", "put"):
            speed, limit = row[f"{way}_gib_s"], row[f"raw_{way}_gib_s"]
            cells += [f"{speed:.2f}", f"{limit:.2f}", output.percent(speed / limit)]
        table.add_row(*cells)
    output.result_console().print(table)
