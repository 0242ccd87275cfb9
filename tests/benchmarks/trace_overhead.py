"""`python -m tests.benchmarks.trace_overhead`: what a trace adds to the time to the first token.

The same prompt is answered with one token, without a trace, with one, and without one once more, in
turn. The first and the last differ in nothing: what stands between them is what the method cannot
tell apart. Seconds are wall-clock, of the whole request.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from cacheblend_rag import BlendConfig, TransformersEngine
from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.bench.workload import LEAD_IN, ONE_TOKEN, draw_passage, sample_sentences
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import benchmark_app

SEED = 20260101
WITHOUT, WITH, AGAIN = "without a trace", "with a trace", "without a trace, again"
QUESTION = "\n\nQuestion: Who is named here, and what did they do in which year? Be brief.\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class TracePlan(Plan):
    """Time to the first token with a trace, over that without one, in one process."""

    model: str = option("smollm2", "Model name, folder or GGUF file.")
    chunks: int = option(8, "Chunks in the prompt.", least=1)
    chunk_tokens: int = option(512, "Tokens of a chunk.", least=1)
    selectors: tuple[str, ...] = option(
        ("question_mid", "hkvd"), "Selector; repeatable.", flag="--selector"
    )
    ratio: float = option(0.15, "Recompute ratio.", least=0)
    repeat: int = option(9, "Timed runs each; medians are shown.", least=1)


def measure_trace(plan: TracePlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return for each selector median seconds, and what a trace adds in the same turn."""
    advance("loading the model")
    with closing(TransformersEngine(plan.model, lead_in=LEAD_IN)) as engine:
        if engine.blend_refusal is not None:
            raise ConfigError(f"blending is off: {engine.blend_refusal}")
        draw, sentences = random.Random(SEED), sample_sentences()
        texts = [
            draw_passage(draw, sentences, plan.chunk_tokens, engine) for _ in range(plan.chunks)
        ]
        advance(f"precomputing {plan.chunks} chunks")
        chunks = [Chunk(text) for text in texts]
        engine.precompute(chunks, progress=False)
        prompt = BlendPrompt.of(*chunks, QUESTION)
        rows = [_row(plan, engine, prompt, selector, advance) for selector in plan.selectors]
        tokens = len(engine.prepare(prompt).token_ids)
    return {"model": plan.model, "prompt_tokens": tokens, "ratio": plan.ratio, "rows": rows}


def _row(
    plan: TracePlan,
    engine: TransformersEngine,
    prompt: BlendPrompt,
    selector: str,
    advance: Advance,
) -> dict[str, Any]:
    config = BlendConfig(
        selector=selector, recompute_ratio=plan.ratio, min_tokens=0, cost_model=False,
        reuse_prefix=False,
    )  # fmt: skip
    traced = {WITHOUT: False, WITH: True, AGAIN: False}

    def asked(trace: bool, _: int) -> float:
        began = time.perf_counter()
        report = engine.generate(prompt, ONE_TOKEN, config=config.with_changes(trace=trace)).report
        seconds = time.perf_counter() - began
        if not report.blended or (report.trace is not None) is not trace:
            raise ConfigError(f"not blended as asked: {report.reason or 'the trace'}")
        return seconds

    cases = {name: partial(asked, trace) for name, trace in traced.items()}
    runs = run_in_turns(cases, plan.repeat, advance)
    return {
        "selector": selector,
        "seconds": {name: median(found) for name, found in runs.items()},
        "overhead": _excess(runs[WITH], runs[WITHOUT]),
        "noise": _excess(runs[AGAIN], runs[WITHOUT]),
        "runs": runs,
    }


def _excess(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True)) - 1


def _show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        told = {"prompt_tokens": found["prompt_tokens"], **row["seconds"]}
        told |= {"overhead": row["overhead"], "noise": row["noise"]}
        facts(f"a trace with {row['selector']}")({**told, "runs": row["runs"]})


app = benchmark_app(TracePlan, measure_trace, _show)

if __name__ == "__main__":
    app()
