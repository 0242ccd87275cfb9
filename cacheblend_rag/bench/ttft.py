"""Time to first token of a blend against ordinary prefill, on random weights of a real shape."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal, get_args

import torch

from cacheblend_rag.bench.interleave import Advance, Case, run_in_turns
from cacheblend_rag.bench.memory import peak_extra_bytes
from cacheblend_rag.bench.servers import own_redis
from cacheblend_rag.bench.shapes import ModelShape
from cacheblend_rag.bench.vllm import VLLMSetting
from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    blend_config,
    check_tiers,
    draw_chunks,
    draw_words,
)
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.config import BlendConfig, Precision, StoreConfig
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.vllm.connector.settings import check_attention_mode
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt

Tier = Literal["host", "disk", "redis"]
TIERS: tuple[Tier, ...] = get_args(Tier)
USUAL_TIERS: tuple[Tier, ...] = ("host", "disk")
"""Those that need no server."""
_DOCUMENT = "bench"
_SEED = 7
_CPU = torch.device("cpu")
VLLM_BATCHED_TOKENS = 2048
"""vLLM's default of max_num_batched_tokens."""


@dataclass(frozen=True)
class TtftPlan:
    """What is measured: every tier at every ratio, ``repeat`` times each, medians reported.

    chunk_tokens: tokens a chunk. question_tokens: the only text of the prompt, behind the chunks.
    batched_tokens: most tokens vLLM computes in a step, None is the whole prompt. eager: vLLM does
    not compile the model. attention: of recomputed rows in vLLM, see ConnectorSettings.
    precision: of stored chunk KV.
    """

    shape: ModelShape
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratios: tuple[float, ...] = (0.15,)
    tiers: tuple[Tier, ...] = USUAL_TIERS
    selector: str = "hkvd"
    check_layers: tuple[int, ...] = (1,)
    repeat: int = 5
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    memory: bool = True
    batched_tokens: int | None = None
    eager: bool = False
    attention: str = "auto"
    precision: Precision = "native"

    def __post_init__(self) -> None:
        StoreConfig(precision=self.precision)  # which raises where there is none of that name
        check_attention_mode(self.attention)
        check_tiers(self.tiers, TIERS)
        self.shape.check_prompt(self.prompt_tokens)
        for ratio in self.ratios:
            plan_schedule(self.config(ratio), self.shape.layers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.chunks * self.chunk_tokens + self.question_tokens

    @property
    def setting(self) -> VLLMSetting:
        """The model as vLLM is to run it."""
        return VLLMSetting(self.shape, self.dtype, self.device, self.eager)

    @property
    def step_tokens(self) -> int:
        """Most tokens vLLM computes in a step: its default, or what holds the prompt if longer."""
        return self.batched_tokens or max(VLLM_BATCHED_TOKENS, self.prompt_tokens)

    def config(self, ratio: float) -> BlendConfig:
        """Return the blend's config at ``ratio``: what is measured is a blend, however slow."""
        return blend_config(ratio, self.selector, self.check_layers).with_changes(cost_model=False)

    def bound(self, ratio: float) -> float:
        """Return the largest speedup the computed tokens allow: full prefill's work by the blend's.

        Work is counted as tokens x layers: all tokens up to and at the (first) check layer, and
        the question with the ratio's share of the chunks in the rest. Selectors that choose before
        layer 0 have no such first part; those that ask the question pay its probe pass.
        """
        selector = make_selector(self.selector)
        question = self.question_tokens / self.prompt_tokens
        kept = ratio * self.chunks * self.chunk_tokens / self.prompt_tokens + question
        if 0 < ratio < 1 and selector.needs_fresh_kv:
            whole = (self.check_layers[0] + 1) / self.shape.layers
            return 1 / (whole + (1 - whole) * kept)
        probe = question if 0 < ratio < 1 and selector.needs_question else 0.0
        return 1 / (kept + probe)


@dataclass(frozen=True)
class TtftRow:
    """One tier at one ratio. Seconds are medians of ``runs``; ``speedup`` = full / blend seconds.

    bound: the speedup that the computed tokens allow (`TtftPlan.bound`). peak_extra_bytes: the
    most a blend holds beyond weights and store, None where unmeasurable. prompt_kv_bytes: the
    prompt's own KV. prefix_caching_seconds: of vLLM's own prefix caching on the same chunks in
    another order, None in the embedded engine. batched_tokens: most tokens vLLM computes in a step.
    runs: seconds of each run of ``full``, ``blend`` and ``prefix_caching``. load_seconds: what the
    blend waited for reads. load_hidden_seconds: what it did not wait of them, since it computed.
    hidden_share: the latter's share of both. None in memory, unless chunks are unpacked there, and
    in vLLM. precision: of stored chunk KV.
    """

    engine: str
    shape: str
    prompt_tokens: int
    selector: str
    ratio: float
    tier: str
    full_seconds: float
    blend_seconds: float
    speedup: float
    bound: float
    share_of_bound: float
    peak_extra_bytes: int | None
    prompt_kv_bytes: int
    prefix_caching_seconds: float | None = None
    batched_tokens: int | None = None
    runs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    load_seconds: float | None = None
    load_hidden_seconds: float | None = None
    hidden_share: float | None = None
    precision: str = "native"

    @classmethod
    def of(
        cls,
        plan: TtftPlan,
        engine: str,
        ratio: float,
        tier: str,
        runs: Mapping[str, Sequence[float]],
        *,
        peak_extra_bytes: int | None = None,
        batched_tokens: int | None = None,
        loads: Sequence[tuple[float, float]] = (),
    ) -> TtftRow:
        """Make a row of what was measured; ``runs`` as the row holds them.

        loads: what each blend waited for reads, and what it did not.
        """
        seconds = {name: median(run) for name, run in runs.items()}
        bound, speedup = plan.bound(ratio), seconds["full"] / seconds["blend"]
        return cls(
            engine=engine,
            shape=plan.shape.name,
            prompt_tokens=plan.prompt_tokens,
            selector=plan.selector,
            ratio=ratio,
            tier=tier,
            full_seconds=seconds["full"],
            blend_seconds=seconds["blend"],
            speedup=speedup,
            bound=bound,
            share_of_bound=speedup / bound,
            peak_extra_bytes=peak_extra_bytes,
            prompt_kv_bytes=plan.shape.kv_bytes(plan.prompt_tokens, plan.dtype),
            prefix_caching_seconds=seconds.get("prefix_caching"),
            batched_tokens=batched_tokens,
            runs=runs,
            precision=plan.precision,
            **_hiding(loads),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def _hiding(loads: Sequence[tuple[float, float]]) -> dict[str, float]:
    if not loads:
        return {}
    return {
        "load_seconds": median(waited for waited, _ in loads),
        "load_hidden_seconds": median(hidden for _, hidden in loads),
        "hidden_share": median(hidden / (waited + hidden) for waited, hidden in loads),
    }


def measure_ttft(plan: TtftPlan, advance: Advance = lambda _: None) -> list[TtftRow]:
    """Measure, in one process: ordinary prefill and each blend in turn, after a warm-up.

    advance: called with a label before each step, for a progress display.
    """
    advance("building the model")
    model = plan.shape.build_model(dtype=plan.dtype, device=plan.device)
    tokenizer = plan.shape.build_tokenizer()
    chunks, question = draw_texts(plan)
    prompt = BlendPrompt.of(*chunks, question)
    with ExitStack() as stack:
        engines: dict[str, TransformersEngine] = {}
        for tier in plan.tiers:
            advance(f"precomputing for {tier}")
            engines[tier] = TransformersEngine(
                model,
                tokenizer=tokenizer,
                lead_in=LEAD_IN,
                store=_store(tier, plan.precision, stack),
            )
            engines[tier].precompute(chunks, progress=False)
        return _Measurement(plan, engines, prompt, advance).rows()


@dataclass(frozen=True)
class _Measurement:
    plan: TtftPlan
    engines: dict[str, TransformersEngine]
    prompt: BlendPrompt
    advance: Advance
    loads: defaultdict[tuple[str, float], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def rows(self) -> list[TtftRow]:
        cases = {
            f"blend from {tier} at ratio {ratio:g}": (tier, ratio)
            for tier in self.engines
            for ratio in self.plan.ratios
        }
        blends: dict[str, Case] = {
            name: partial(self._blend, *case) for name, case in cases.items()
        }
        runs = run_in_turns({"full": self._full, **blends}, self.plan.repeat, self.advance)
        return [
            self._row(case, {"full": runs["full"], "blend": runs[name]})
            for name, case in cases.items()
        ]

    def _full(self, _turn: int) -> float:
        engine = next(iter(self.engines.values()))
        return _first_token_seconds(engine.generate_full(self.prompt, ONE_TOKEN))

    def _blend(self, tier: str, ratio: float, turn: int) -> float:
        generation = self.engines[tier].generate(
            self.prompt, ONE_TOKEN, config=self.plan.config(ratio)
        )
        check_blend(self.plan, generation, ratio, tier)
        if turn:
            seconds = generation.report.seconds
            self.loads[tier, ratio].append((seconds.load, seconds.load_hidden))
        return _first_token_seconds(generation)

    def _row(self, case: tuple[str, float], runs: Mapping[str, Sequence[float]]) -> TtftRow:
        plan, (tier, ratio) = self.plan, case
        peak = None
        if plan.memory:
            self.advance(f"memory of a blend from {tier} at ratio {ratio:g}")
            peak = peak_extra_bytes(lambda: self._blend(tier, ratio, 0), plan.device)
        name = self.engines[tier].name
        loads = () if (tier, plan.precision) == ("host", "native") else self.loads[case]
        return TtftRow.of(plan, name, ratio, tier, runs, peak_extra_bytes=peak, loads=loads)


def check_blend(plan: TtftPlan, generation: Generation, ratio: float, tier: str) -> None:
    """Raise CacheBlendError unless all chunks came from ``tier`` and the selector chose rows."""
    report = generation.report
    if not report.blended or any(chunk.tier != tier for chunk in report.chunks):
        raise CacheBlendError(f"no blend from {tier} came about: {report.reason or 'a miss'}")
    if 0 < ratio < 1 and report.selector != plan.selector:
        found = f"{report.selector} ({report.selector_reason})"
        raise CacheBlendError(f"rows were not chosen by {plan.selector} but {found}")


def _first_token_seconds(generation: Generation) -> float:
    return generation.report.seconds.time_to_first_token


def _store(tier: str, precision: Precision, stack: ExitStack) -> TieredKVStore:
    """Return a store that holds everything in one tier; from disk every blend reads files."""
    if tier == "host":
        return TieredKVStore.open(host_bytes=None, precision=precision)
    if tier == "redis":
        return TieredKVStore.of(StoreConfig(tiers=(own_redis(stack),), precision=precision))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-"))
    return TieredKVStore.open(host_bytes=0, disk_path=folder, precision=precision)


def draw_texts(plan: TtftPlan) -> tuple[list[Chunk], str]:
    """Return the chunks and the question."""
    rng, vocabulary = random.Random(_SEED), plan.shape.vocabulary
    chunks = draw_chunks(
        rng, plan.chunks, plan.chunk_tokens, vocabulary, selector=plan.selector, name=_DOCUMENT
    )
    return chunks, draw_words(rng, plan.question_tokens, vocabulary)


def plan_tiers(names: Sequence[str]) -> tuple[Tier, ...]:
    """Return known tier names, without repeats; raises ConfigError for others."""
    check_tiers(names, TIERS)
    return tuple(tier for tier in TIERS if tier in names)
