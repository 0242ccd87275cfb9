"""``cacheblend-rag bench``: speed on this machine, on random weights of real shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.config import VLLM
from cacheblend_rag.engines.quiet import quiet_libraries
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.rag import checks

if TYPE_CHECKING:
    from cacheblend_rag.bench.interleave import Advance
    from cacheblend_rag.bench.ttft import TtftRow
    from cacheblend_rag.bench.vllm import VLLMKind, VLLMSetting
    from cacheblend_rag.config import Precision

ENGINES = ("transformers", "vllm", "vllm-server")
Measure = Callable[["Advance"], dict[str, Any]]

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

ShapeOption = Annotated[
    str,
    typer.Option(
        help="smollm2-135m, smollm2-360m, qwen2.5-0.5b, llama-3.2-1b, mistral-7b, llama-3.1-8b."
    ),
]
ChunksOption = Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")]
ChunkTokensOption = Annotated[int, typer.Option(min=1, help="Tokens a chunk.")]
QuestionTokensOption = Annotated[int, typer.Option(min=1, help="Tokens behind the chunks.")]
SelectorOption = Annotated[str, typer.Option(help="The selector.")]
CheckLayersOption = Annotated[
    str, typer.Option(help="Where hkvd compares, comma-separated.", metavar="LAYER,...")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, cuda, mps, ...; vLLM runs on what it was built for.")
]
EagerOption = Annotated[bool, typer.Option("--eager", help="vLLM without compiling the model.")]


@bench_app.command("ttft")
def ttft_command(
    *,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")] = ENGINES[0],
    shape: ShapeOption = "smollm2-135m",
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    question_tokens: QuestionTokensOption = 32,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Recompute ratio; repeatable. 0.15 by default.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="host, disk or redis (a server started here); repeatable. "
            "The first two by default."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")] = 5,
    selector: SelectorOption = "hkvd",
    check_layers: CheckLayersOption = "1",
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens vLLM computes in a step; whole prompts by default."),
    ] = None,
    eager: EagerOption = False,
    attention: Annotated[
        str, typer.Option(help="Of recomputed rows in vLLM: auto, native, sdpa or flex.")
    ] = "auto",
    precision: Annotated[
        str, typer.Option(help="Of stored chunk KV: native, fp8 or int8.")
    ] = "native",
    as_json: options.JsonOption = False,
) -> None:
    """Time to first token of ordinary prefill and of a blend, on random weights of a real shape.

    With vLLM, its own prefix caching stands beside them, on the same chunks in another order.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    _check_options(dtype, selector)
    from cacheblend_rag.bench import ttft
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device

    with output.stdout_reserved(as_json):
        quiet_libraries()
        plan = ttft.TtftPlan(
            shape=named_shape(shape),
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            ratios=tuple(dict.fromkeys(ratio or [0.15])),
            tiers=ttft.plan_tiers(tier or ttft.USUAL_TIERS),
            selector=selector,
            check_layers=options.layers(check_layers, "--check-layers"),
            repeat=repeat,
            dtype=named_dtype(dtype),
            device=pick_device(device),
            batched_tokens=batched_tokens,
            eager=eager,
            attention=attention,
            precision=cast("Precision", precision),
        )
        if engine != ENGINES[0]:
            checks.check_engine(VLLM)
        with output.side_console().status("starting") as status:
            if engine == "transformers":
                rows = ttft.measure_ttft(plan, status.update)
            else:
                from cacheblend_rag.bench.ttft_vllm import measure_vllm_ttft

                rows = measure_vllm_ttft(cast("VLLMKind", engine), plan, status.update)
    if as_json:
        plain = [row.to_dict() for row in rows]
        # The first row's fields stand at the top as well, so that one figure is read the same way.
        output.print_json(plain[0] if len(plain) == 1 else {**plain[0], "rows": plain})
    else:
        _print_ttft(rows)


@bench_app.command("store")
def store_command(
    *,
    chunk_mib: Annotated[int, typer.Option(min=1, help="Size of the chunk KV moved.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each.")] = 7,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A tier to measure; repeatable. By default host, disk, Redis and S3, "
            "with servers started here.",
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """How fast chunk KV goes into each tier and comes out, beside the raw limit of this machine."""
    from cacheblend_rag.bench.store import StorePlan, measure_store

    plan = StorePlan(chunk_mib, repeat, tier)
    _measure(lambda advance: measure_store(plan, advance), _print_speeds, as_json)


@bench_app.command("lookups")
def lookups_command(
    *,
    few: Annotated[int, typer.Option(min=1, help="Chunks in the smaller tier.")] = 1000,
    many: Annotated[int, typer.Option(min=1, help="Chunks in the larger one.")] = 100_000,
    asked: Annotated[int, typer.Option(min=1, help="Chunks asked for a turn.")] = 100,
    repeat: Annotated[int, typer.Option(min=1, help="Turns; medians are shown.")] = 5,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="host, disk, redis or s3 (servers started here); repeatable. "
            "The first three by default: filling S3 takes many minutes."
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """How long it takes to find, miss and read one chunk among few and among many.

    In memory, on disk and in a Redis started here; filling them takes minutes.
    """
    from cacheblend_rag.bench.lookups import USUAL_TIERS, LookupPlan, measure_lookups

    plan = LookupPlan(few, many, asked, repeat, tier or USUAL_TIERS)
    _measure(lambda advance: measure_lookups(plan, advance), _print_lookups, as_json)


@bench_app.command("faults")
def faults_command(
    *,
    shape: ShapeOption = "smollm2-135m",
    chunks: ChunksOption = 4,
    chunk_tokens: ChunkTokensOption = 96,
    question_tokens: QuestionTokensOption = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Timed turns; medians are shown.")] = 20,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: options.JsonOption = False,
) -> None:
    """What requests pay for a dead Redis below memory, after its first failure."""
    _check_options(dtype)
    from cacheblend_rag.bench.faults import FaultsPlan, measure_faults
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device

    quiet_libraries()
    plan = FaultsPlan(
        named_shape(shape),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        repeat=repeat,
        dtype=named_dtype(dtype),
        device=pick_device(device),
    )
    _measure(lambda advance: measure_faults(plan, advance), _print_faults, as_json)


@bench_app.command("overhead")
def overhead_command(
    *,
    shape: ShapeOption = "smollm2-135m",
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of prompts without chunks.")
    ] = 1024,
    decoded: Annotated[int, typer.Option(min=2, help="Tokens of a timed answer.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each.")] = 20,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    eager: EagerOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """What the connector costs requests without chunks, against vLLM without it."""
    _check_options(dtype)
    from cacheblend_rag.bench.overhead import OverheadPlan, measure_overhead

    def measure(advance: Advance) -> dict[str, Any]:
        setting = _setting(shape, dtype, device, eager)
        return measure_overhead(OverheadPlan(setting, prompt_tokens, decoded, repeat), advance)

    _measure_facts("requests without chunks", measure, as_json)


@bench_app.command("throughput")
def throughput_command(
    *,
    shape: ShapeOption = "smollm2-135m",
    questions: Annotated[int, typer.Option(min=1, help="Questions, all sent at once.")] = 64,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks to draw from.")] = 40,
    drawn: Annotated[int, typer.Option(min=1, help="Chunks a question draws.")] = 6,
    chunk_tokens: ChunkTokensOption = 512,
    question_tokens: QuestionTokensOption = 32,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer.")] = 8,
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = 0.15,
    selector: SelectorOption = "hkvd",
    check_layers: CheckLayersOption = "1",
    seed: Annotated[int, typer.Option(help="Draws chunks and questions.")] = 7,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    eager: EagerOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Questions a second in vLLM: blended, plain, and with vLLM's own prefix caching."""
    _check_options(dtype, selector)
    from cacheblend_rag.bench.throughput import ThroughputPlan, measure_throughput

    def measure(advance: Advance) -> dict[str, Any]:
        plan = ThroughputPlan(
            _setting(shape, dtype, device, eager),
            questions=questions,
            chunks=chunks,
            drawn=drawn,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            answer_tokens=answer_tokens,
            ratio=ratio,
            selector=selector,
            check_layers=options.layers(check_layers, "--check-layers"),
            seed=seed,
        )
        return measure_throughput(plan, advance)

    _measure_facts("throughput in vLLM", measure, as_json)


@bench_app.command("steady")
def steady_command(
    *,
    shape: ShapeOption = "smollm2-135m",
    requests: Annotated[int, typer.Option(min=1, help="Requests, no two alike.")] = 1000,
    chunks: Annotated[int, typer.Option(min=1, help="Stored chunks.")] = 200,
    drawn: Annotated[int, typer.Option(min=1, help="Chunks a request draws.")] = 4,
    chunk_tokens: ChunkTokensOption = 96,
    question_tokens: QuestionTokensOption = 16,
    exponent: Annotated[float, typer.Option(min=0, help="Of Zipf's law.")] = 1.0,
    held: Annotated[float, typer.Option(help="Share of the chunks that memory holds.")] = 0.25,
    full_every: Annotated[
        int, typer.Option(min=1, max=100, help="Every so many requests ordinary prefill, too.")
    ] = 1,
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = 0.15,
    selector: SelectorOption = "hkvd",
    check_layers: CheckLayersOption = "1",
    seed: Annotated[int, typer.Option(help="Draws chunks and questions.")] = 7,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: options.JsonOption = False,
) -> None:
    """Speedup and hit share by hundreds of requests, from a store larger than memory."""
    _check_options(dtype, selector)
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.bench.steady import SteadyPlan, measure_steady
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device

    quiet_libraries()
    plan = SteadyPlan(
        named_shape(shape),
        requests=requests,
        chunks=chunks,
        drawn=drawn,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        exponent=exponent,
        held=held,
        full_every=full_every,
        ratio=ratio,
        selector=selector,
        check_layers=options.layers(check_layers, "--check-layers"),
        seed=seed,
        dtype=named_dtype(dtype),
        device=pick_device(device),
    )
    _measure(lambda advance: measure_steady(plan, advance), _print_steady, as_json)


@bench_app.command("decode-gap")
def decode_gap_command(
    *,
    shape: ShapeOption = "smollm2-135m",
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    question_tokens: QuestionTokensOption = 32,
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = 0.15,
    selector: SelectorOption = "hkvd",
    check_layers: CheckLayersOption = "1",
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")] = 5,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    eager: EagerOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """The longest a decoding neighbour waits in vLLM while a long prompt is served."""
    _check_options(dtype, selector)
    from cacheblend_rag.bench.decode_gap import measure_gaps
    from cacheblend_rag.bench.ttft import TtftPlan

    def measure(advance: Advance) -> dict[str, Any]:
        setting = _setting(shape, dtype, device, eager)
        plan = TtftPlan(
            setting.shape,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            ratios=(ratio,),
            tiers=("host",),
            selector=selector,
            check_layers=options.layers(check_layers, "--check-layers"),
            repeat=repeat,
            dtype=setting.dtype,
            device=setting.device,
            eager=eager,
        )
        return measure_gaps(plan, advance)

    _measure_facts("a neighbour's worst gap between tokens", measure, as_json)


@bench_app.command("attention")
def attention_command(
    *,
    shape: ShapeOption = "mistral-7b",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Length of a prompt; repeatable. 4096 by default.")
    ] = None,
    ratio: Annotated[float, typer.Option(help="Share of the tokens that is recomputed.")] = 0.15,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")] = 5,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: options.JsonOption = False,
) -> None:
    """One layer's attention over scattered rows: SDPA and, on CUDA, FlexAttention."""
    _check_options(dtype)
    from cacheblend_rag.bench.attention import AttentionPlan, measure_attention
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device

    plan = AttentionPlan(
        named_shape(shape),
        tuple(tokens or [4096]),
        ratio,
        named_dtype(dtype),
        pick_device(device),
        repeat,
    )

    def show(found: dict[str, Any]) -> None:
        for row in found["rows"]:
            rows = f"{row['computed_rows']:,} of {row['tokens']:,} rows"
            output.print_facts(f"one layer of {shape}, {rows}, seconds", row["seconds"])

    _measure(lambda advance: measure_attention(plan, advance), show, as_json)


@bench_app.command("precision")
def precision_command(
    *,
    shape: ShapeOption = "llama-3.1-8b",
    chunk_tokens: ChunkTokensOption = 512,
    dtype: DtypeOption = "bfloat16",
    questions: Annotated[
        int, typer.Option(min=1, help="Demo questions whose chunks' KV is rounded.")
    ] = 5,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs each; medians are shown.")] = 5,
    as_json: options.JsonOption = False,
) -> None:
    """Bytes, time and error of chunk KV stored as computed, as fp8 and as int8.

    Bytes and time are of one chunk of the shape on disk, the error is that of the bundled model's
    KV. What it does to answers is told by `eval --store precision=fp8`.
    """
    _check_options(dtype)
    from cacheblend_rag.bench.precision import PrecisionPlan, measure_precision
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.engines.transformers.loading import named_dtype
    from cacheblend_rag.quality.sample import demo_kv

    def measure(advance: Advance) -> dict[str, Any]:
        quiet_libraries()
        plan = PrecisionPlan(
            named_shape(shape), named_dtype(dtype), chunk_tokens, demo_kv(questions), repeat
        )
        rows = [row.to_dict() for row in measure_precision(plan, advance)]
        return {"shape": shape, "chunk_tokens": chunk_tokens, "rows": rows}

    def show(found: dict[str, Any]) -> None:
        for row in found["rows"]:
            output.print_facts(f"{row.pop('precision')}, {shape}", row)

    _measure(measure, show, as_json)


@bench_app.command("registry")
def registry_command(
    chunks: Annotated[int, typer.Option(min=1, help="Registered chunks.")] = 100_000,
    prompt_characters: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 20_000,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 200,
    as_json: options.JsonOption = False,
) -> None:
    """Time to find registered chunks in a prompt's text."""
    from cacheblend_rag.bench.registry import measure_registry

    _measure_facts(
        "chunk registry", lambda _: measure_registry(chunks, prompt_characters, repeat), as_json
    )


@bench_app.command("fill")
def fill_command(
    *,
    shape: ShapeOption = "smollm2-135m",
    layers: Annotated[int, typer.Option(min=2, help="Layers of that shape.")] = 4,
    chunks: Annotated[int, typer.Option(min=1, help="Registered chunks.")] = 20_000,
    room: Annotated[float, typer.Option(help="Share of them that the store has room for.")] = 0.05,
    requests: Annotated[int, typer.Option(min=1, help="Requests, one after another.")] = 1000,
    drawn: Annotated[int, typer.Option(min=1, help="Chunks a request draws.")] = 4,
    chunk_tokens: ChunkTokensOption = 64,
    question_tokens: QuestionTokensOption = 16,
    exponent: Annotated[float, typer.Option(help="Of Zipf's law.")] = 1.0,
    pause: Annotated[
        float, typer.Option(min=0, help="Seconds between two requests, in which chunks are filled.")
    ] = 0.1,
    neighbours: Annotated[int, typer.Option(min=1, help="Timed requests without chunks.")] = 200,
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = 0.15,
    selector: SelectorOption = "chunk_head",
    seed: Annotated[int, typer.Option(help="Draws chunks and requests.")] = 7,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: options.JsonOption = False,
) -> None:
    """How a store that holds a part of the corpus warms by traffic, and what neighbours feel of it.

    Nothing is precomputed: registered chunks are filled as requests miss them.
    """
    _check_options(dtype, selector)
    from cacheblend_rag.bench.fill import FillPlan, measure_fill
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device

    def measure(advance: Advance) -> dict[str, Any]:
        quiet_libraries()
        plan = FillPlan(
            named_shape(shape),
            layers=layers,
            chunks=chunks,
            room=room,
            requests=requests,
            drawn=drawn,
            chunk_tokens=chunk_tokens,
            question_tokens=question_tokens,
            exponent=exponent,
            pause_seconds=pause,
            neighbours=neighbours,
            ratio=ratio,
            selector=selector,
            dtype=named_dtype(dtype),
            device=pick_device(device),
            seed=seed,
        )
        return measure_fill(plan, advance)

    _measure(measure, _print_fill, as_json)


def _check_options(dtype: str, selector: str | None = None) -> None:
    """Raise ConfigError for what is wrong whatever is measured, before importing what measures."""
    checks.check_placement(None, dtype)
    checks.check_blend(None, selector)


def _setting(shape: str, dtype: str, device: str, eager: bool) -> VLLMSetting:
    from cacheblend_rag.bench.shapes import named_shape
    from cacheblend_rag.bench.vllm import VLLMSetting
    from cacheblend_rag.engines.transformers.loading import named_dtype, pick_device

    quiet_libraries()
    setting = VLLMSetting(named_shape(shape), named_dtype(dtype), pick_device(device), eager)
    checks.check_engine(VLLM)
    return setting


def _measure(measure: Measure, show: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    """Measure, and show what was found, or print it as it is; say what was left out."""
    with output.stdout_reserved(as_json), output.side_console().status("starting") as status:
        found = measure(status.update)
    for reason in found.get("left_out", ()):
        output.warn(f"left out: {reason}")
    (output.print_json if as_json else show)(found)


def _measure_facts(title: str, measure: Measure, as_json: bool) -> None:
    def show(found: dict[str, Any]) -> None:
        output.print_facts(title, {name: v for name, v in found.items() if name != "runs"})

    _measure(measure, show, as_json)


def _print_fill(found: dict[str, Any]) -> None:
    _print_hundreds(found)
    output.print_facts("requests without chunks, meanwhile", found["neighbours"])


def _print_hundreds(found: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"{found['chunks']:,} chunks registered, room for {found['room_chunks']:,}"
    table = Table(title=title)
    for heading in ("requests", "hits", "asked before", "speedup"):
        table.add_column(heading, justify="right")
    asked = 0
    for row in found["hundreds"]:
        asked += row["requests"]
        table.add_row(
            f"{asked:,}",
            output.percent(row["hit_share"]),
            output.percent(row["seen_share"]),
            f"{row['speedup']:.2f}x",
        )
    output.result_console().print(table)


def _print_ttft(rows: Sequence[TtftRow]) -> None:
    from rich.table import Table

    first = rows[0]
    title = f"{first.shape}, {first.prompt_tokens:,} tokens, {first.engine}, {first.selector}"
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


def _print_steady(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['shape']}, {found['prompt_tokens']:,} tokens a prompt")
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


def _print_speeds(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="GiB a second, and the share of the raw limit")
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


def _print_faults(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        output.print_facts(f"Redis {row.pop('redis')}, {row.pop('chunks')} chunks", row)


def _print_lookups(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="microseconds a chunk")
    table.add_column("tier")
    for heading in ("stored", "find", "miss", "open"):
        table.add_column(heading, justify="right")
    for row in found["lookups"]:
        times = [f"{row[f'{kind}_microseconds']:.0f}" for kind in ("find", "miss", "open")]
        table.add_row(row["tier"], f"{row['stored']:,}", *times)
    output.result_console().print(table)


def _memory(row: TtftRow) -> str:
    if row.peak_extra_bytes is None:
        return "not measured"
    return f"{row.peak_extra_bytes / row.prompt_kv_bytes:.2f}x prompt KV"
