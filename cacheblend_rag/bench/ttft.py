"""Measures time to first token on any engine, alternating full prefill and blend."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    pieces,
    run_in_turns,
    to_chunks,
)
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import context_window_in, text_config
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.settings import EngineConfig, LeadInConfig
from cacheblend_rag.text.chunk import SEPARATOR, Chunk
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt

DOCUMENT = "bench"
"""The document of all chunks, by which their KV is evicted at the end."""
QUESTION_TOKENS = 32
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
    """Return the medians and runs of each way, in plain JSON values.

    There are ``repeat`` runs of each way, with chunks in another order each time; every prompt is
    blended, however slow. With vLLM its own prefix caching is a way, too: before each of its runs
    every chunk is requested alone, so that the one that begins the prompt is in its cache.

    speedup: full / blend seconds. bound: the speedup that the computed floating-point operations
    allow, 1 / compute_share of the report; None where the engine does not tell them. hidden_share:
    of the time of reading chunks, the part in which the blend computed. advance: called with the
    label of each step, for a progress display.

    Raises ConfigError when the prompt does not fit, ModelLoadError when there is no such model.
    """
    if config.model:
        window = context_window_in(text_config(config.model))
        check_prompt(chunks * chunk_tokens + QUESTION_TOKENS, window)
    blend = config.blend.with_changes(min_tokens=0, reuse_prefix=False, cost_model=False)
    config = config.with_changes(blend=blend)
    if config.lead_in == LeadInConfig():
        config = config.with_changes(lead_in=LEAD_IN)
    advance(f"loading {config.model}".rstrip())
    with closing(open_engine(config)) as engine:
        known, question = _draw_texts(engine, chunks, chunk_tokens)
        # In another order, a chunk's last token may be joined with the separator, or not.
        whole = _prompt(known, question).encode(PromptEncoder(engine.tokenizer))
        check_prompt(len(whole.token_ids) + chunks, engine.context_window)
        advance("precomputing the chunks")
        engine.precompute(known, progress=False)
        try:
            return _measured(engine, known, question, repeat, advance)
        finally:
            engine.evict_document(DOCUMENT)


def check_prompt(tokens: int, window: int) -> None:
    """Raise ConfigError when a prompt of so many tokens, and one more, does not fit."""
    if tokens >= window:
        raise ConfigError(f"prompt_tokens={tokens} must be below the context window, {window}")


def _draw_texts(engine: Engine, chunks: int, chunk_tokens: int) -> tuple[list[Chunk], str]:
    """Return chunks of the package's passages, and a question made of its questions."""
    real, rng, encoder = load_real_texts(), random.Random(SEED), PromptEncoder(engine.tokenizer)

    def count_tokens(text: str) -> int:
        return len(encoder.chunk(text))

    cut = islice(pieces(rng, real.passages, chunk_tokens, count_tokens), chunks)
    selector = engine.config.selector
    known = to_chunks([*cut], selector=selector, name=DOCUMENT, separator=SEPARATOR)
    return known, next(pieces(rng, real.questions, QUESTION_TOKENS, count_tokens))


def _prompt(chunks: Sequence[Chunk], question: str) -> BlendPrompt:
    parts = [part for chunk in chunks for part in (chunk, SEPARATOR)]
    return BlendPrompt.of(*parts, question)


def _measured(
    engine: Engine, chunks: Sequence[Chunk], question: str, repeat: int, advance: Advance
) -> dict[str, Any]:
    reports: list[BlendReport] = []

    def prompt(turn: int) -> BlendPrompt:
        return _prompt(random.Random(turn).sample(chunks, len(chunks)), question)

    def full(turn: int) -> float:
        return _first_token(engine.generate_full(prompt(turn), ONE_TOKEN))

    def blend(turn: int) -> float:
        answer = engine.generate(prompt(turn), ONE_TOKEN)
        report = answer.report
        if not report.blended or not all(chunk.hit for chunk in report.chunks):
            raise CacheBlendError(f"the prompt was not blended: {report.reason or 'a miss'}")
        reports.append(report)
        return _first_token(answer)

    def prefix_caching(turn: int) -> float:
        for chunk in chunks:
            engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SALT)
        return _first_token(engine.generate_full(prompt(turn), ONE_TOKEN, cache_salt=SALT))

    cases: dict[str, Case] = {"full": full, "blend": blend}
    if engine.name in OF_VLLM:
        cases["prefix_caching"] = prefix_caching
    runs = run_in_turns(cases, repeat, advance)
    seconds = {f"{name}_seconds": median(taken) for name, taken in runs.items()}
    report, spent = reports[-1], [one.seconds for one in reports[1:]]
    waited = median(one.look_up + one.load for one in spent)
    hidden = median(one.load_hidden for one in spent)
    return {
        "engine": engine.name,
        "model": engine.model_name,
        "prompt_tokens": report.prompt_tokens,
        "selector": report.selector,
        "ratio": report.recompute_ratio,
        "tiers": sorted({chunk.tier or "" for chunk in report.chunks}),
        **seconds,
        "speedup": seconds["full_seconds"] / seconds["blend_seconds"],
        "bound": 1 / report.compute_share if report.compute_share else None,
        "load_seconds": waited,
        "hidden_share": hidden / (waited + hidden) if waited + hidden else None,
        "runs": runs,
    }


def _first_token(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token
