"""Measures time to first token in vLLM: blends, ordinary prefill, and vLLM's prefix caching.

All three run on one engine, for one token, and are timed from the call to the answer: every figure
includes tokenizing, scheduling and the way to vLLM's process and back. The prompt's chunks are in a
different order each turn. Ordinary prefill and blends get a new salt each time, so vLLM's prefix
cache never serves them. The prefix caching case uses one salt, and before each of its runs every
chunk is requested alone, so that the chunk at the beginning of the prompt is in the cache.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheblend_rag.bench.plans import TtftPlan
from cacheblend_rag.bench.ttft import (
    DOCUMENT,
    TtftRow,
    check_blend,
    draw_texts,
    store_config,
    tier_name,
)
from cacheblend_rag.bench.vllm import VLLMKind, engine_options, running_vllm, served_model
from cacheblend_rag.bench.workload import ONE_TOKEN, Advance, Case, Texts, run_in_turns
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.report import BlendReport
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

CACHED_PROMPTS = 4
FULL, PREFIX_CACHING = "ordinary prefill", "prefix caching"
SHARED_SALT = "prefix-caching"


def measure_vllm_ttft(plan: TtftPlan, advance: Advance = lambda _: None) -> list[TtftRow]:
    """Measure every tier in an engine of its own: all cases in turn, after a warm-up.

    advance: called with a label before each step.
    """
    texts = draw_texts(plan)
    if not plan.model:
        advance("building the model")
    rows: list[TtftRow] = []
    with served_model(plan) as model:
        for tier in dict.fromkeys(plan.tiers):
            advance(f"starting vLLM for {tier}")
            with _engine(plan, texts, model, tier) as engine:
                rows += _Measurement(plan, texts, engine, tier_name(tier), advance).rows()
    return rows


@contextmanager
def _engine(plan: TtftPlan, texts: Texts, model: Path | str, tier: str) -> Iterator[VLLMEngine]:
    options = engine_options(plan, texts.most_tokens, CACHED_PROMPTS)
    options["max_num_batched_tokens"] = plan.step_tokens(texts.most_tokens)
    with tempfile.TemporaryDirectory(prefix="cacheblend-kv-") as kv:
        store = store_config(tier, kv, plan.precision)
        settings = ConnectorSettings(store=store)
        kind = cast("VLLMKind", plan.engine)
        with running_vllm(kind, model, options=options, settings=settings) as engine:
            yield engine
            engine.evict_document(DOCUMENT)


@dataclass
class _Measurement:
    plan: TtftPlan
    texts: Texts
    engine: VLLMEngine
    tier: str
    advance: Advance
    reports: dict[float, BlendReport] = field(default_factory=dict)

    def rows(self) -> list[TtftRow]:
        plan = self.plan
        self.advance(f"precomputing for {self.tier}")
        self.engine.precompute(self.texts.chunks, progress=False)
        blends: dict[str, Case] = {
            f"blend from {self.tier} at ratio {ratio:g}": partial(self._blend, ratio)
            for ratio in plan.ratios
        }
        cases = {FULL: self._full, PREFIX_CACHING: self._prefix_caching, **blends}
        runs = run_in_turns(cases, plan.repeat, self.advance)
        full, prefix_caching = runs[FULL], runs[PREFIX_CACHING]
        return [
            TtftRow.of(
                plan,
                self.engine.name,
                ratio,
                self.tier,
                {"full": full, "blend": runs[name], "prefix_caching": prefix_caching},
                report=self.reports[ratio],
                batched_tokens=plan.step_tokens(self.texts.most_tokens),
            )
            for name, ratio in zip(blends, plan.ratios, strict=True)
        ]

    def _full(self, turn: int) -> float:
        prompt = self._prompt(turn)
        started = time.perf_counter()
        self.engine.generate_full(prompt, ONE_TOKEN)
        return time.perf_counter() - started

    def _blend(self, ratio: float, turn: int) -> float:
        prompt = self._prompt(turn)
        config = self.plan.blend_config(ratio)
        started = time.perf_counter()
        generation = self.engine.generate(prompt, ONE_TOKEN, config=config)
        seconds = time.perf_counter() - started
        check_blend(self.plan, generation, ratio, self.tier)
        self.reports[ratio] = generation.report
        return seconds

    def _prefix_caching(self, turn: int) -> float:
        for chunk in self.texts.chunks:
            self.engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SHARED_SALT)
        prompt = self._prompt(turn)
        started = time.perf_counter()
        self.engine.generate_full(prompt, ONE_TOKEN, cache_salt=SHARED_SALT)
        return time.perf_counter() - started

    def _prompt(self, turn: int) -> BlendPrompt:
        chunks = self.texts.chunks
        return self.texts.prompt(random.Random(turn).sample(chunks, len(chunks)))
