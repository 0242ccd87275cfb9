"""Measures time to first token on any engine, alternating full prefill and blend."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    SEED,
    Advance,
    Case,
    Texts,
    draw_real_texts,
    run_in_turns,
)
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import context_window_in, text_config
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.settings import EngineConfig, LeadInConfig
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt

DOCUMENT = "bench"
"""The document of all chunks, by which their KV is evicted at the end."""
QUESTION_TOKENS = 32
SALT = "prefix-caching"
OF_VLLM = ("vllm", "vllm-server")
"""Engines with a prefix cache of vLLM's own."""


@dataclass(frozen=True)
class TtftPlan:
    """What is measured: ``repeat`` runs of each way, with chunks in another order each time.

    Raises ConfigError when the prompt does not fit, ModelLoadError when there is no such model.

    config: the engine's settings.
    """

    config: EngineConfig
    chunks: int = 8
    chunk_tokens: int = 512
    repeat: int = 5

    def __post_init__(self) -> None:
        if model := self.config.model:
            tokens = self.chunks * self.chunk_tokens + QUESTION_TOKENS
            check_prompt(tokens, context_window_in(text_config(model)))

    def open_engine(self) -> Engine:
        """Open an engine that blends every prompt, however slow."""
        blend = self.config.blend.with_changes(min_tokens=0, reuse_prefix=False, cost_model=False)
        config = self.config.with_changes(blend=blend)
        if config.lead_in == LeadInConfig():
            config = config.with_changes(lead_in=LEAD_IN)  # prompts begin with a chunk
        return open_engine(config)

    def draw_texts(self, engine: Engine) -> Texts:
        """Return chunks and a question; raises ConfigError when a prompt of them does not fit."""
        texts = draw_real_texts(
            random.Random(SEED),
            PromptEncoder(engine.tokenizer),
            chunks=self.chunks,
            chunk_tokens=self.chunk_tokens,
            question_tokens=QUESTION_TOKENS,
            selector=engine.config.selector,
            name=DOCUMENT,
        )
        check_prompt(texts.most_tokens, engine.context_window)
        return texts


def check_prompt(tokens: int, window: int) -> None:
    """Raise ConfigError when a prompt of so many tokens, and one more, does not fit."""
    if tokens >= window:
        raise ConfigError(f"prompt_tokens={tokens} must be below the context window, {window}")


def measure_ttft(plan: TtftPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return the medians and runs of each way, in plain JSON values.

    With vLLM its own prefix caching is a way, too: before each of its runs every chunk is requested
    alone, so that the one that begins the prompt is in its cache.

    speedup: full / blend seconds. bound: the speedup that the computed floating-point operations
    allow, 1 / compute_share of the report; None where the engine does not tell them. hidden_share:
    of the time of reading chunks, the part in which the blend computed. advance: called with the
    label of each step, for a progress display.
    """
    advance(f"loading {plan.config.model}".rstrip())
    with closing(plan.open_engine()) as engine:
        texts = plan.draw_texts(engine)
        advance("precomputing the chunks")
        engine.precompute(texts.chunks, progress=False)
        try:
            return _Measurement(plan, engine, texts, []).result(advance)
        finally:
            engine.evict_document(DOCUMENT)


@dataclass(frozen=True)
class _Measurement:
    plan: TtftPlan
    engine: Engine
    texts: Texts
    blends: list[Generation]

    def result(self, advance: Advance) -> dict[str, Any]:
        cases: dict[str, Case] = {"full": self._full, "blend": self._blend}
        if self.engine.name in OF_VLLM:
            cases["prefix_caching"] = self._prefix_caching
        runs = run_in_turns(cases, self.plan.repeat, advance)
        seconds = {f"{name}_seconds": median(taken) for name, taken in runs.items()}
        report = self.blends[-1].report
        speedup = seconds["full_seconds"] / seconds["blend_seconds"]
        share = report.compute_share
        return {
            "engine": self.engine.name,
            "model": self.engine.model_name,
            "prompt_tokens": report.prompt_tokens,
            "selector": report.selector,
            "ratio": report.recompute_ratio,
            "tiers": sorted({chunk.tier or "" for chunk in report.chunks}),
            **seconds,
            "speedup": speedup,
            "bound": 1 / share if share else None,
            "share_of_bound": speedup * share if share else None,
            **self._loads(),
            "runs": runs,
        }

    def _loads(self) -> Mapping[str, float | None]:
        """Return medians of seconds waited for stored KV and of reading hidden by computing."""
        seconds = [one.report.seconds for one in self.blends[1:]]
        waited = median(one.look_up + one.load for one in seconds)
        hidden = median(one.load_hidden for one in seconds)
        share = hidden / (waited + hidden) if waited + hidden else None
        return {"load_seconds": waited, "load_hidden_seconds": hidden, "hidden_share": share}

    def _full(self, turn: int) -> float:
        return _first_token(self.engine.generate_full(self._prompt(turn), ONE_TOKEN))

    def _blend(self, turn: int) -> float:
        answer = self.engine.generate(self._prompt(turn), ONE_TOKEN)
        report = answer.report
        if not report.blended or not all(chunk.hit for chunk in report.chunks):
            raise CacheBlendError(f"the prompt was not blended: {report.reason or 'a miss'}")
        self.blends.append(answer)
        return _first_token(answer)

    def _prefix_caching(self, turn: int) -> float:
        for chunk in self.texts.chunks:
            self.engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SALT)
        prompt = self._prompt(turn)
        return _first_token(self.engine.generate_full(prompt, ONE_TOKEN, cache_salt=SALT))

    def _prompt(self, turn: int) -> BlendPrompt:
        chunks: Sequence[Any] = self.texts.chunks
        return self.texts.prompt(random.Random(turn).sample(chunks, len(chunks)))


def _first_token(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token
