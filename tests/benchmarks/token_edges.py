"""How many tokens of passages real tokenizers keep in chat prompts, by what stands around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli import output
from cacheblend_rag.engines.tokenizer import load_tokenizer
from tests.benchmarks.command import benchmark_app
from tests.passage_edges import JOINS, PassageIndex, texts_of
from tests.real import gemma

GEMMA = "gemma3"
GEMMA_TEMPLATE = (
    "{% for m in messages %}<start_of_turn>user\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "<start_of_turn>model\n"
)
"""Its GGUF file has no template."""


@dataclass(frozen=True, kw_only=True)
class TokenEdgesPlan(Plan):
    """Share of passages' tokens that are found in chat prompts, and tokens lost at the edges.

    Passages are cut out of data sets' texts and put into prompts, four in each, with blank lines,
    bullets, tags, quotes or JSON around them.
    """

    models: tuple[str, ...] = option(
        ("toy", "smollm2"),
        f"A model's tokenizer; repeatable. {GEMMA} is Gemma 3 270M, 240 MB, fetched if missing.",
        flag="--model",
    )
    tokens: tuple[int, ...] = option((512, 100), "Tokens of a passage; repeatable.")
    files: tuple[str, ...] = option(
        (), "A data set to take texts from; repeatable. By default the samples.", flag="--file"
    )
    passages: int = option(200, "Passages of each length, at most.", least=4)


def measure_token_edges(plan: TokenEdgesPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``rows`` by model, length and surroundings.

    found: share of the passages' tokens. lost: mean and most tokens lost at an edge. over_2: share
    of the edges that lost more than two. behind_space: how many passages are indexed in the form
    behind a space, too.
    """
    texts, rows = texts_of(*map(Path, plan.files)), list[dict[str, Any]]()
    for model in plan.models:
        tokenizer = _tokenizer(model)
        for tokens in plan.tokens:
            advance(f"{model}, {tokens} tokens")
            index = PassageIndex(tokenizer, texts, tokens, plan.passages)
            for join in JOINS:
                edges = index.edges(join)
                rows.append(
                    {
                        "model": model,
                        "tokens": tokens,
                        "passages": len(edges.lost) // 2,
                        "behind_space": index.behind_space,
                        "around": join,
                        "found": edges.found,
                        "mean_lost": mean(edges.lost),
                        "most_lost": max(edges.lost),
                        "over_2": edges.over_2,
                    }
                )
    return {"rows": rows}


def _tokenizer(model: str) -> Any:
    tokenizer = load_tokenizer(gemma.fetch() if model == GEMMA else model)
    if model == GEMMA:
        tokenizer.chat_template = GEMMA_TEMPLATE
    return tokenizer


def show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="passages found in chat prompts; tokens lost at an edge")
    for heading in ("model", "around"):
        table.add_column(heading)
    for heading in ("tokens", "passages", "found", "mean", "most", "over 2"):
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        table.add_row(
            row["model"], row["around"], str(row["tokens"]), str(row["passages"]),
            f"{row['found']:.2%}", f"{row['mean_lost']:.2f}", str(row["most_lost"]),
            f"{row['over_2']:.1%}",
        )  # fmt: skip
    output.result_console().print(table)


app = benchmark_app(TokenEdgesPlan, measure_token_edges, show)

if __name__ == "__main__":
    app()
