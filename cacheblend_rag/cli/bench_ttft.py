"""Time to first token of a blend against ordinary prefill, on random weights of a real shape."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.chunks import Chunk, Document
from cacheblend_rag.cli.bench_memory import peak_extra_bytes
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.base import Generation, SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.shapes import ModelShape
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prompt import BlendPrompt

Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
_DOCUMENT = "bench"
_SEED = 7
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TtftPlan:
    """What is measured: every tier at every ratio, ``repeat`` times each, medians reported.

    chunk_tokens: tokens a chunk. question_tokens: the only text of the prompt, behind the chunks.
    """

    shape: ModelShape
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratios: tuple[float, ...] = (0.15,)
    tiers: tuple[Tier, ...] = TIERS
    selector: str = "hkvd"
    check_layers: tuple[int, ...] = (1,)
    repeat: int = 5
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    memory: bool = True

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier not in TIERS:
                raise ConfigError(f"tier={tier!r} must be one of {', '.join(TIERS)}")
        if self.prompt_tokens >= self.shape.max_positions:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} must be below {self.shape.max_positions}, "
                f"the positions of {self.shape.name}"
            )
        for ratio in self.ratios:
            self.config(ratio)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.chunks * self.chunk_tokens + self.question_tokens

    def config(self, ratio: float) -> BlendConfig:
        """Return the blend's config at ``ratio``; chunks are precomputed behind nothing."""
        return BlendConfig(
            recompute_ratio=ratio,
            check_layers=self.check_layers,
            selector=self.selector,
            lead_in="none",
            min_tokens=0,
        )

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
    """One tier at one ratio. Seconds are medians; ``speedup`` = full / blend seconds.

    bound: the speedup that the computed tokens allow (`TtftPlan.bound`). peak_extra_bytes: the
    most a blend holds beyond weights and store, None where unmeasurable. prompt_kv_bytes: the
    prompt's own KV.
    """

    engine: str
    shape: str
    prompt_tokens: int
    ratio: float
    tier: str
    full_seconds: float
    blend_seconds: float
    speedup: float
    bound: float
    share_of_bound: float
    peak_extra_bytes: int | None
    prompt_kv_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def measure_ttft(plan: TtftPlan, advance: Callable[[str], None] = lambda _: None) -> list[TtftRow]:
    """Measure, in one process: ordinary prefill and each blend in turn, after a warm-up.

    advance: called with a label before each step, for a progress display.
    """
    advance("building the model")
    model = plan.shape.build_model(dtype=plan.dtype, device=plan.device)
    tokenizer = plan.shape.build_tokenizer()
    chunks, prompt = _texts(plan)
    with ExitStack() as stack:
        engines: dict[str, TransformersEngine] = {}
        for tier in plan.tiers:
            advance(f"precomputing for {tier}")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-")))
            engines[tier] = TransformersEngine(
                model, tokenizer=tokenizer, config=plan.config(0.0), store=_store(tier, folder)
            )
            engines[tier].precompute(chunks, progress=False)
        return _Measurement(plan, engines, prompt, advance).rows()


@dataclass(frozen=True)
class _Measurement:
    plan: TtftPlan
    engines: dict[str, TransformersEngine]
    prompt: BlendPrompt
    advance: Callable[[str], None]

    def rows(self) -> list[TtftRow]:
        cases = [(tier, ratio) for tier in self.engines for ratio in self.plan.ratios]
        full: list[float] = []
        blend: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
        for turn in range(self.plan.repeat + 1):
            label = f"turn {turn}" if turn else "warm-up"
            self.advance(f"{label}: ordinary prefill")
            seconds = self._full()
            full += [seconds] if turn else []
            for case in cases:
                self.advance(f"{label}: blend from {case[0]} at ratio {case[1]:g}")
                seconds = self._blend(*case)
                blend[case] += [seconds] if turn else []
        return [self._row(case, median(full), median(blend[case])) for case in cases]

    def _full(self) -> float:
        engine = next(iter(self.engines.values()))
        return _first_token_seconds(engine.generate_full(self.prompt, _ONE_TOKEN))

    def _blend(self, tier: str, ratio: float) -> float:
        generation = self.engines[tier].generate(
            self.prompt, _ONE_TOKEN, config=self.plan.config(ratio)
        )
        report = generation.report
        if not report.blended or any(chunk.tier != tier for chunk in report.chunks):
            raise CacheBlendError(f"no blend from {tier} came about: {report.reason or 'a miss'}")
        return _first_token_seconds(generation)

    def _row(self, case: tuple[str, float], full: float, blend: float) -> TtftRow:
        plan, (tier, ratio) = self.plan, case
        peak = None
        if plan.memory:
            self.advance(f"memory of a blend from {tier} at ratio {ratio:g}")
            peak = peak_extra_bytes(lambda: self._blend(tier, ratio), plan.device)
        bound = plan.bound(ratio)
        return TtftRow(
            engine=self.engines[tier].name,
            shape=plan.shape.name,
            prompt_tokens=plan.prompt_tokens,
            ratio=ratio,
            tier=tier,
            full_seconds=full,
            blend_seconds=blend,
            speedup=full / blend,
            bound=bound,
            share_of_bound=full / blend / bound,
            peak_extra_bytes=peak,
            prompt_kv_bytes=plan.shape.kv_bytes(plan.prompt_tokens, plan.dtype),
        )


_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def _first_token_seconds(generation: Generation) -> float:
    return generation.report.seconds.time_to_first_token


def _store(tier: str, folder: Path) -> TieredKVStore:
    """Return a store that holds everything in one tier; from disk every blend reads files."""
    if tier == "host":
        return TieredKVStore.open(host_bytes=None)
    return TieredKVStore.open(host_bytes=0, disk_path=folder)


def _texts(plan: TtftPlan) -> tuple[list[Chunk], BlendPrompt]:
    """Return the chunks, and a prompt that holds them all and then the question.

    Chunks form one document where the selector needs a prior, else they stand alone.
    """
    rng = random.Random(_SEED)
    vocabulary = plan.shape.vocabulary
    texts = tuple(_words(rng, plan.chunk_tokens, vocabulary) for _ in range(plan.chunks))
    if make_selector(plan.selector).needs_prior:
        chunks = Document(_DOCUMENT, texts, separator=" ").to_chunks()
    else:
        chunks = [Chunk(text) for text in texts]
    return chunks, BlendPrompt.of(*chunks, _words(rng, plan.question_tokens, vocabulary))


def _words(rng: random.Random, count: int, vocabulary: int) -> str:
    return "".join(f"t{rng.randrange(vocabulary)} " for _ in range(count))


def plan_tiers(names: Sequence[str]) -> tuple[Tier, ...]:
    """Return known tier names, without repeats; raises ConfigError for others."""
    for name in names:
        if name not in TIERS:
            raise ConfigError(f"tier={name!r} must be one of {', '.join(TIERS)}")
    return tuple(tier for tier in TIERS if tier in names)
