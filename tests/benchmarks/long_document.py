"""Answers about documents of several lengths: time, memory, and bytes on disk."""

from __future__ import annotations

import random
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

from cacheblend_rag import (
    SamplingParams,
    TransformersEngine,
    analyze_long_document,
    open_engine,
)
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli import output
from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prefill.comparing import divergence
from cacheblend_rag.quality.data.sentences import CountTokens
from cacheblend_rag.quality.questions import SINGLE_HOP, choose_questions
from cacheblend_rag.rag.window_prompts import WindowPrompts
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app

SEED = 5
QUESTION = "Who is named here? Give one name."
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LongDocumentPlan(Plan):
    """One question about documents of several lengths, each in a process of its own.

    The documents are paragraphs of Wikipedia in random order, each with a number; KV is on disk,
    and memory holds little of it. Linux only.
    """

    model: str = option("smollm2", "smollm2, demo, or a folder in hub format.")
    tokens: tuple[int, ...] = option((25_000, 50_000, 100_000, 200_000), "Lengths.", comma=True)
    chunk_tokens: int = option(2048, "Most tokens of a chunk.", least=16)
    overlap: int = option(256, "Most tokens that a chunk repeats of the one before.", least=0)
    window: int = option(5, "Most chunks of a prompt.", least=1)
    max_tokens: int = option(16, "Tokens of an answer.", least=1)
    windows: int = option(1 << 30, "Only the first windows of each document.", least=1)
    compared: int = option(3, "Windows that are also read by full prefill.", least=1)
    host_bytes: int = option(256 * MIB, "Memory for KV.", least=0)


def measure_long_documents(
    plan: LongDocumentPlan, advance: Advance = lambda _: None
) -> dict[str, Any]:
    """Return a row for each length."""
    rows = []
    for tokens in plan.tokens:
        advance(f"{tokens:,} tokens")
        # A new process: memory that an earlier document needed must not count.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            rows.append(process.submit(_measured, replace(plan, tokens=(tokens,))).result())
    return {"model": plan.model, "window": plan.window, "rows": rows}


def document_text(tokens: int, count: CountTokens, seed: int = SEED) -> str:
    """Return numbered paragraphs of Wikipedia, together of so many tokens or a little more."""
    data = choose_questions(SINGLE_HOP, (), 1000, None, seed)
    texts = sorted({passage.text for question in data.questions for passage in question.passages})
    draw, found, total = random.Random(seed), [], 0
    while total < tokens:
        found.append(f"Note {len(found) + 1}. {draw.choice(texts)}\n\n")
        total += count(found[-1])
    return "".join(found).rstrip()


def _measured(plan: LongDocumentPlan) -> dict[str, Any]:
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        opened = open_engine(
            "transformers", model=plan.model, kv_path=folder, host_bytes=plan.host_bytes
        )
        assert isinstance(opened, TransformersEngine)
        with closing(opened) as engine:
            document = document_text(plan.tokens[0], lambda text: len(engine.tokenize(text)))
            before = _new_peak()
            analysis = analyze_long_document(
                engine,
                document,
                QUESTION,
                chunk_tokens=plan.chunk_tokens,
                overlap=plan.overlap,
                window=plan.window,
                sampling=SamplingParams.greedy(max_tokens=plan.max_tokens, ignore_eos=True),
            )
            answers = list(islice(analysis, plan.windows))
            report, peak = analysis.report, _peak()
            compared = answers[len(answers) // 2 :][: plan.compared]
            chunks = engine.registry.document(report.document_id, report.collection)
            prompts = WindowPrompts.of(QUESTION, engine.tokenizer, engine.instruction)
            windows = [chunks[one.first_chunk : one.end_chunk] for one in compared]
            full = [
                _by_full_prefill(engine, prompts.window(window), plan.max_tokens)
                for window in windows
            ]
            on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*.*"))
    if report.refused or not compared:
        raise ConfigError(f"chunks were not stored: {report.refused}")
    first = median(one.answer.ttft_seconds for one in compared)
    full_first = median(seconds for seconds, _ in full)
    return {
        "tokens": report.tokens,
        "chunks": report.chunks,
        "chunks_in_window": report.window,
        "windows": len(answers),
        "computed_chunks": report.computed_chunks,
        "computed_tokens": report.computed_tokens,
        "prompt_tokens": report.prompt_tokens,
        "reused_tokens": report.reused_tokens,
        "seconds": report.seconds,
        "ttft_seconds": first,
        "full_ttft_seconds": full_first,
        "speedup": full_first / first,
        "mean_kl": mean(kl for _, kl in full),
        "memory_before": before,
        "peak_memory": peak,
        "bytes_on_disk": on_disk,
    }


def _by_full_prefill(
    engine: TransformersEngine, prompt: BlendPrompt, answer_tokens: int
) -> tuple[float, float]:
    """Return the time to first token of full prefill, and how far a blend is from it.

    That is the mean divergence of its predictions over full prefill's own answer, in nats.
    """
    sampling = SamplingParams.greedy(max_tokens=answer_tokens, ignore_eos=True)
    answer = engine.generate_full(prompt, sampling)
    wanted = engine.score(prompt, answer.token_ids, full=True)
    found = engine.score(prompt, answer.token_ids)
    kl = divergence(wanted.log_probs.double(), found.log_probs.double())
    return answer.report.seconds.time_to_first_token, kl


def _new_peak() -> int:
    """Forget the process's peak memory; return what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Return the most anonymous and mapped memory that the process held, in bytes."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(kib) * 1024


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['model']}: long documents", box=None, title_justify="left")
    for heading in (
        "tokens", "chunks", "windows", "computed", "in prompts", "first token", "full",
        "speedup", "KL", "memory", "peak", "on disk",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        table.add_row(
            f"{row['tokens']:,}",
            str(row["chunks"]),
            f"{row['windows']} of {row['chunks_in_window']}",
            f"{row['computed_tokens']:,}",
            f"{row['prompt_tokens']:,}",
            output.duration(row["ttft_seconds"]),
            output.duration(row["full_ttft_seconds"]),
            f"{row['speedup']:.1f}x",
            f"{row['mean_kl']:.3f}",
            f"{row['memory_before'] / MIB:,.0f} MiB",
            f"{row['peak_memory'] / MIB:,.0f} MiB",
            f"{row['bytes_on_disk'] / MIB:,.0f} MiB",
        )
    console = output.result_console()
    console.width = max(console.width, 120)
    console.print(table)


app = benchmark_app(LongDocumentPlan, measure_long_documents, _show)

if __name__ == "__main__":
    app()
