"""``store plan``: computes the size of chunk KV, and which tiers suffice for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli.options import DtypeOption, JsonOption, ModelOption, finite
from cacheblend_rag.cli.output import print_json, print_rows
from cacheblend_rag.settings.sizes import size

if TYPE_CHECKING:
    from cacheblend_rag.rag.planning import CapacityPlan


def plan(
    model: ModelOption,
    corpus_tokens: Annotated[int, typer.Option(min=1, help="Tokens of all chunks.")],
    *,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=CAPACITY,BANDWIDTH[,LATENCY]",
            help="A tier, such as disk=1TiB,2GiB/s,0.001; the fastest first.",
        ),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Chunk tokens of a prompt.")] = 4096,
    compute_seconds: Annotated[
        float, typer.Option(min=0, callback=finite, help="Until the first token, beside loading.")
    ] = 0.0,
    ttft: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, callback=finite, help="What it may take in all."),
    ] = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the size of a model's chunk KV, which tiers hold it and which are fast enough."""
    from cacheblend_rag.rag import planning

    tiers = [planning.PlannedTier.parse(text) for text in tier or ()]
    work = planning.Workload(corpus_tokens, chunk_tokens, prompt_tokens, compute_seconds, ttft)
    shape = planning.KVShape.of(model, dtype or "", None)
    made = planning.plan_store(shape, work, tiers)
    sizes = [
        (of.precision, f"{of.bytes_per_token:,.0f}", size(of.corpus_bytes), size(of.prompt_bytes))
        for of in made.precisions
    ]
    if as_json:
        print_json({"model": model, **made.to_dict()})
        return
    print_rows(("precision", "bytes a token", "corpus", "a prompt"), sizes)
    if tiers:
        _show_tiers(made)


def _show_tiers(made: CapacityPlan) -> None:
    rows = [
        (
            of.precision,
            on.tier,
            f"{on.chunks:,}",
            f"{on.share:.0%}",
            f"{on.seconds:.3f}",
            "yes" if on.suffices else "too slow" if not on.is_fast else "too small",
        )
        for of in made.precisions
        for on in of.tiers
    ]
    columns = ("precision", "tier", "chunks", "of the corpus", "seconds", "suffices")
    print_rows(columns, rows)
