"""``cacheblend-rag bench``: measures speed on this machine or of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.cli.named_settings import SetOption, engine_config
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import DEFAULT_MODEL, LOCAL_MODELS
from cacheblend_rag.rag import checks
from cacheblend_rag.settings import EMBEDDED

bench_app = typer.Typer(
    help="Measure speed on this machine or of a server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
RepeatOption = Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")]


@bench_app.command("ttft")
def ttft_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"{LOCAL_MODELS}, or a hub name. A server has its own.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    *,
    engine: Annotated[
        str, typer.Option(help="transformers, vllm or the URL of a `serve`.")
    ] = EMBEDDED,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 512,
    repeat: RepeatOption = 5,
    settings: SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the time to first token by ordinary prefill and by a blend.

    With vLLM its own prefix caching is measured, too, on the chunks in another order.
    """
    checks.check_engine(engine)
    default = "" if "://" in engine else DEFAULT_MODEL
    config = engine_config(settings, engine=engine, model=model or default)
    quiet_libraries()
    checks.check_placement(config.device, config.dtype)
    from cacheblend_rag.bench.ttft import measure_ttft

    if config.model:
        checks.check_model(config.model)
    checks.check_selector(config.blend.selector, config.blend.selector_options)
    with output.stdout_reserved(as_json), output.side_console().status("starting") as status:
        found = measure_ttft(
            config, chunks=chunks, chunk_tokens=chunk_tokens, repeat=repeat, advance=status.update
        )
    (output.print_json if as_json else _print_ttft)(found)


@bench_app.command("store")
def store_command(
    tiers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TIER",
            help="host, disk or a tier's URL, such as redis://cache:6379/0.",
            show_default="host disk",
        ),
    ] = None,
    *,
    repeat: RepeatOption = 7,
    as_json: options.JsonOption = False,
) -> None:
    """Measure how fast each tier writes and reads chunk KV of 64 MiB."""
    with output.stdout_reserved(as_json), output.side_console().status("starting") as status:
        from cacheblend_rag.bench.store import measure_store

        found = measure_store(tiers or ("host", "disk"), repeat, status.update)
    (output.print_json if as_json else _print_store)(found)


@bench_app.command("workload")
def workload_command(
    folder: Annotated[Path, typer.Argument(help="A new folder for documents and requests.")],
    *,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    chunks: Annotated[int, typer.Option(min=1, help="Passages in each.")] = 8,
) -> None:
    """Write requests over real passages as JSONL, for `vllm bench serve` and guidellm."""
    from cacheblend_rag.bench.workload import write_workload

    try:
        typer.echo(write_workload(folder, requests, chunks))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error


def _print_ttft(found: dict[str, Any]) -> None:
    """Print the results of `measure_ttft`."""
    told = {"rule": f"{found['selector']}, ratio {found['ratio']:g}"}
    told["KV from"] = ", ".join(found["tiers"])
    for name in ("full", "prefix_caching", "blend"):
        if f"{name}_seconds" in found:
            told[name] = output.duration(found[f"{name}_seconds"])
    told["speedup"] = f"{found['speedup']:.2f}x"
    if found["bound"] is not None:
        told["bound"] = f"{found['bound']:.2f}x"
    if found["hidden_share"] is not None:
        told["reading hidden"] = output.percent(found["hidden_share"])
    title = f"{found['model']}, {found['prompt_tokens']:,} tokens, {found['engine']}"
    output.print_facts(title, told)


def _print_store(found: dict[str, Any]) -> None:
    """Print the results of `measure_store`."""
    table = output.table("GiB per second", ("tier",), ("get", "put"))
    for row in found["tiers"]:
        table.add_row(row["tier"], f"{row['get_gib_s']:.2f}", f"{row['put_gib_s']:.2f}")
    output.result_console().print(table)
