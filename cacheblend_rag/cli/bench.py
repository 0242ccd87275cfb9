"""``cacheblend-rag bench``: time to first token, and the chunk registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import output

if TYPE_CHECKING:
    from cacheblend_rag.cli.bench_ttft import TtftRow

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@bench_app.command("ttft")
def ttft_command(
    *,
    shape: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, smollm2-360m, qwen2.5-0.5b, llama-3.2-1b, mistral-7b, llama-3.1-8b."
        ),
    ] = "smollm2-135m",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens a chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens behind the chunks.")] = 32,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Recompute ratio; repeatable. 0.15 by default.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="host or disk; repeatable. Both by default.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")] = 5,
    selector: Annotated[str, typer.Option(help="The selector.")] = "hkvd",
    check_layers: Annotated[
        str, typer.Option(help="Where hkvd compares, comma-separated.", metavar="LAYER,...")
    ] = "1",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, ...")] = "cpu",
    as_json: output.JsonOption = False,
) -> None:
    """Time to first token of ordinary prefill and of a blend, on random weights of a real shape."""
    from cacheblend_rag.cli import bench_ttft, models
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device
    from cacheblend_rag.engines.transformers.shapes import named_shape

    with output.stdout_reserved(as_json):
        models.quiet_libraries()
        plan = bench_ttft.TtftPlan(
            shape=named_shape(shape),
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            ratios=tuple(dict.fromkeys(ratio or [0.15])),
            tiers=bench_ttft.plan_tiers(tier or bench_ttft.TIERS),
            selector=selector,
            check_layers=output.layers(check_layers, "--check-layers"),
            repeat=repeat,
            dtype=named_dtype(dtype),
            device=pick_device(device),
        )
        with output.side_console().status("starting") as status:
            rows = bench_ttft.measure_ttft(plan, status.update)
    if as_json:
        plain = [row.to_dict() for row in rows]
        # The first row's fields stand at the top as well, so that one figure is read the same way.
        output.print_json(plain[0] if len(plain) == 1 else {**plain[0], "rows": plain})
    else:
        _print_ttft(rows)


@bench_app.command("registry")
def registry_command(
    chunks: Annotated[int, typer.Option(min=1, help="Registered chunks.")] = 100_000,
    prompt_characters: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 20_000,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 200,
    as_json: output.JsonOption = False,
) -> None:
    """Time to find registered chunks in a prompt's text."""
    from cacheblend_rag.cli.bench_registry import measure_registry

    with output.stdout_reserved(as_json), output.side_console().status("measuring"):
        found = measure_registry(chunks, prompt_characters, repeat)
    if as_json:
        output.print_json(found)
    else:
        output.print_facts("chunk registry", found)


def _print_ttft(rows: Sequence[TtftRow]) -> None:
    from rich.table import Table

    table = Table(title=f"{rows[0].shape}, {rows[0].prompt_tokens:,} tokens, {rows[0].engine}")
    table.add_column("KV from")
    for heading in (
        "ratio", "full prefill", "blend", "speedup", "bound", "of the bound", "extra memory",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        extra = row.peak_extra_bytes
        table.add_row(
            row.tier,
            f"{row.ratio:g}",
            output.duration(row.full_seconds),
            output.duration(row.blend_seconds),
            f"{row.speedup:.2f}x",
            f"{row.bound:.2f}x",
            output.percent(row.share_of_bound),
            "not measured" if extra is None else f"{extra / row.prompt_kv_bytes:.2f}x prompt KV",
        )
    output.result_console().print(table)
