"""Measures time to first token by ordinary prefill and by a blend, in any engine, in turn."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import islice
from statistics import median
from typing import Any

from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    SEED,
    Advance,
    Case,
    cut_passages,
    run_in_turns,
    to_chunks,
)
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import context_window_in, text_config
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.settings import EngineConfig, LeadInConfig
from cacheblend_rag.text.chunk import SEPARATOR, Chunk
from cacheblend_rag.text.prompt import BlendPrompt

DOCUMENT = "bench"
"""The document of all chunks, by which their KV is evicted at the end."""
QUESTION_TOKENS = 32
"""At most, with what joins the chunks."""
SALT = "prefix-caching"
OF_VLLM = ("vllm", "vllm-server")
"""Engines with a prefix cache of vLLM's own."""


def measure_ttft(
    config: EngineConfig,
    *,
    chunks: int = 8,
    chunk_tokens: int = 512,
    repeat: int = 5,
    advance: Advance = lambda _: None,
) -> dict[str, Any]:
    """Return the medians and runs of each way to answer, in plain JSON values.

    Chunks are in another order each time. With vLLM its own prefix caching is a way, too: before
    each of its runs every chunk is requested alone, so that the one that begins the prompt is in
    its cache.

    speedup: full / blend seconds. bound: the speedup that the computed floating-point operations
    allow, 1 / compute_share of the report; None where the engine does not tell them. hidden_share:
    of the time of reading chunks, the part in which the blend computed.

    Raises ConfigError when the prompt does not fit, ModelLoadError when there is no such model.

    config: the engine's settings. advance: called with the label of each step.
    """
    tokens = chunks * (chunk_tokens + 1) + QUESTION_TOKENS
    if config.model:
        _check_fits(tokens, context_window_in(text_config(config.model)))
    advance(f"loading {config.model}".rstrip())
    with closing(open_engine(_always_blending(config))) as engine:
        _check_fits(tokens, engine.context_window)
        cut = cut_passages(
            random.Random(SEED), chunk_tokens, lambda text: len(engine.encoder.chunk(text))
        )
        selector = engine.config.selector
        known = to_chunks(list(islice(cut, chunks)), selector=selector, name=DOCUMENT)
        advance("precomputing the chunks")
        engine.precompute(known, progress=False)
        try:
            return _measured(engine, known, repeat, advance)
        finally:
            engine.evict_document(DOCUMENT)


def _always_blending(config: EngineConfig) -> EngineConfig:
    """Return the settings with which every prompt is blended, however slow."""
    blend = config.blend.with_changes(min_tokens=0, reuse_prefix=False, cost_model=False)
    lead_in = LEAD_IN if config.lead_in == LeadInConfig() else config.lead_in
    return config.with_changes(blend=blend, lead_in=lead_in)


def _check_fits(tokens: int, window: int) -> None:
    if tokens >= window:
        raise ConfigError(f"prompt_tokens={tokens} must be below the context window, {window}")


def _measured(engine: Engine, known: list[Chunk], repeat: int, advance: Advance) -> dict[str, Any]:
    question = load_real_texts().questions[0]
    reports: list[BlendReport] = []

    def prompt(turn: int) -> BlendPrompt:
        order = random.Random(turn).sample(known, len(known))
        return BlendPrompt.of(*(part for one in order for part in (one, SEPARATOR)), question)

    def full(turn: int, salt: str | None = None) -> float:
        answer = engine.generate_full(prompt(turn), ONE_TOKEN, cache_salt=salt)
        return answer.report.seconds.time_to_first_token

    def blend(turn: int) -> float:
        report = engine.generate(prompt(turn), ONE_TOKEN).report
        if not report.blended or not all(chunk.hit for chunk in report.chunks):
            raise CacheBlendError(f"the prompt was not blended: {report.reason or 'a miss'}")
        reports.append(report)
        return report.seconds.time_to_first_token

    def prefix_caching(turn: int) -> float:
        for chunk in known:
            engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SALT)
        return full(turn, SALT)

    cases: dict[str, Case] = {"full": full, "blend": blend}
    if engine.name in OF_VLLM:
        cases["prefix_caching"] = prefix_caching
    runs = run_in_turns(cases, repeat, advance)
    seconds = {f"{name}_seconds": median(taken) for name, taken in runs.items()}
    report, share = reports[-1], reports[-1].compute_share
    waited = median(one.seconds.look_up + one.seconds.load for one in reports[1:])
    hidden = median(one.seconds.load_hidden for one in reports[1:])
    speedup = seconds["full_seconds"] / seconds["blend_seconds"]
    return {
        "engine": engine.name,
        "model": engine.model_name,
        "prompt_tokens": report.prompt_tokens,
        "selector": report.selector,
        "ratio": report.recompute_ratio,
        "tiers": sorted({chunk.tier or "" for chunk in report.chunks}),
        **seconds,
        "speedup": speedup,
        "bound": 1 / share if share else None,
        "share_of_bound": speedup * share if share else None,
        "load_seconds": waited,
        "load_hidden_seconds": hidden,
        "hidden_share": hidden / (waited + hidden) if waited + hidden else None,
        "runs": runs,
    }
