"""Measures time to first token of blends and ordinary prefill.

On random weights of a shape and random words, or on a model's own weights and real text.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cacheblend_rag.bench.plans import PromptTokens, TtftPlan
from cacheblend_rag.bench.shapes import NamedModel
from cacheblend_rag.bench.workload import (
    LEAD_IN,
    ONE_TOKEN,
    Advance,
    Case,
    Texts,
    draw_chunks,
    draw_real_texts,
    draw_words,
    run_in_turns,
)
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import give_back_unused
from cacheblend_rag.models import public_name
from cacheblend_rag.report import BlendReport
from cacheblend_rag.settings import Precision, StoreConfig
from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt

DOCUMENT = "bench"
"""The document of all chunks, by which their KV is evicted at the end."""
_SEED = 7
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class TtftRow:
    """One tier at one ratio. Seconds are medians of ``runs``; ``speedup`` = full / blend seconds.

    shape: of random weights, else None. model: whose own weights they are, else None. bound: the
    speedup that the computed tokens allow (`TtftPlan.bound`). work_bound: the speedup that the
    computed floating-point operations allow, attention and probe included: 1 / compute_share of the
    report; None where vLLM itself computes all that is not reused. peak_extra_bytes: the most a
    blend holds beyond weights and store, None where unmeasurable. prompt_kv_bytes: the prompt's
    own KV.
    prefix_caching_seconds: of vLLM's own prefix caching on the same chunks in another order, None
    in the embedded engine. batched_tokens: most tokens vLLM computes in a step.
    runs: seconds of each run of ``full``, ``blend`` and ``prefix_caching``. load_seconds: how long
    the blend waited for reads. load_hidden_seconds: reading time during which it computed.
    hidden_share: the latter's share of both; None in memory, unless chunks are unpacked there, and
    in vLLM. precision: of stored chunk KV. selector_options: those given.
    """

    engine: str
    shape: str | None
    model: str | None
    prompt_tokens: int
    selector: str
    ratio: float
    tier: str
    full_seconds: float
    blend_seconds: float
    speedup: float
    bound: float
    share_of_bound: float
    work_bound: float | None
    share_of_work_bound: float | None
    peak_extra_bytes: int | None
    prompt_kv_bytes: int
    prefix_caching_seconds: float | None = None
    batched_tokens: int | None = None
    runs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    load_seconds: float | None = None
    load_hidden_seconds: float | None = None
    hidden_share: float | None = None
    precision: str = "native"
    selector_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: TtftPlan,
        engine: str,
        ratio: float,
        tier: str,
        runs: Mapping[str, Sequence[float]],
        *,
        report: BlendReport,
        peak_extra_bytes: int | None = None,
        batched_tokens: int | None = None,
        loads: Sequence[tuple[float, float]] = (),
    ) -> TtftRow:
        """Make a row from measurements; ``runs`` as in the row.

        report: of a measured blend. loads: of each blend, the seconds waited for reads
        and those hidden.
        """
        seconds = {name: median(run) for name, run in runs.items()}
        tokens, share = PromptTokens.of(report), report.compute_share
        bound, speedup = plan.bound(ratio, tokens), seconds["full"] / seconds["blend"]
        return cls(
            engine=engine,
            shape=None if plan.model else plan.model_shape.name,
            model=public_name(plan.model) if plan.model else None,
            prompt_tokens=tokens.prompt,
            selector=plan.selector,
            ratio=ratio,
            tier=tier,
            full_seconds=seconds["full"],
            blend_seconds=seconds["blend"],
            speedup=speedup,
            bound=bound,
            share_of_bound=speedup / bound,
            work_bound=1 / share if share else None,
            share_of_work_bound=speedup * share if share else None,
            peak_extra_bytes=peak_extra_bytes,
            prompt_kv_bytes=plan.subject.kv_bytes(tokens.prompt, plan.torch_dtype),
            prefix_caching_seconds=seconds.get("prefix_caching"),
            batched_tokens=batched_tokens,
            runs=runs,
            precision=plan.precision,
            selector_options=plan.options,
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
    texts = draw_texts(plan)
    advance(f"loading {plan.model}" if plan.model else "building the model")
    model, tokenizer = plan.subject.load(dtype=plan.torch_dtype, device=plan.torch_device)
    with ExitStack() as stack:
        engines: dict[str, TransformersEngine] = {}
        for tier in dict.fromkeys(plan.tiers):
            advance(f"precomputing for {tier}")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-"))
            config = store_config(tier, folder, plan.precision)
            store = stack.enter_context(TieredKVStore.of(config))
            engine = TransformersEngine(model, tokenizer=tokenizer, lead_in=LEAD_IN, store=store)
            stack.callback(engine.evict_document, DOCUMENT)
            engine.precompute(texts.chunks, progress=False)
            engines[tier_name(tier)] = engine
        return _Measurement(plan, engines, texts.prompt(), advance).rows()


@dataclass(frozen=True)
class _Measurement:
    plan: TtftPlan
    engines: dict[str, TransformersEngine]
    prompt: BlendPrompt
    advance: Advance
    loads: defaultdict[tuple[str, float], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    reports: dict[tuple[str, float], BlendReport] = field(default_factory=dict)

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
            self.prompt, ONE_TOKEN, config=self.plan.blend_config(ratio)
        )
        check_blend(self.plan, generation, ratio, tier)
        self.reports[tier, ratio] = generation.report
        if turn:
            seconds = generation.report.seconds
            self.loads[tier, ratio].append((seconds.look_up + seconds.load, seconds.load_hidden))
        return _first_token_seconds(generation)

    def _row(self, case: tuple[str, float], runs: Mapping[str, Sequence[float]]) -> TtftRow:
        plan, (tier, ratio) = self.plan, case
        self.advance(f"memory of a blend from {tier} at ratio {ratio:g}")
        peak = peak_extra_bytes(lambda: self._blend(tier, ratio, 0), plan.torch_device)
        name = self.engines[tier].name
        loads = () if (tier, plan.precision) == ("host", "native") else self.loads[case]
        return TtftRow.of(
            plan,
            name,
            ratio,
            tier,
            runs,
            report=self.reports[case],
            peak_extra_bytes=peak,
            loads=loads,
        )


def check_blend(plan: TtftPlan, generation: Generation, ratio: float, tier: str) -> None:
    """Raise CacheBlendError unless all chunks came from ``tier`` and the selector chose rows."""
    report = generation.report
    if not report.blended or any(chunk.tier != tier for chunk in report.chunks):
        raise CacheBlendError(f"not blended from {tier}: {report.reason or 'a miss'}")
    if 0 < ratio < 1 and report.selector != plan.selector:
        found = f"{report.selector} ({report.selector_reason})"
        raise CacheBlendError(f"rows were not chosen by {plan.selector} but {found}")


def _first_token_seconds(generation: Generation) -> float:
    return generation.report.seconds.time_to_first_token


def tier_name(tier: str) -> str:
    """Return a tier's name in reports, given its name or URL."""
    return TierUrl(tier).name if "://" in tier else tier


def store_config(tier: str, folder: str, precision: Precision) -> StoreConfig:
    """Return a store that holds everything in one tier; from disk every blend reads files.

    folder: for the tier ``disk``.
    """
    place = {"host": "host://?capacity=none", "disk": f"disk://{folder}"}.get(tier, tier)
    return StoreConfig(tiers=(place,), precision=precision)


def draw_texts(plan: TtftPlan) -> Texts:
    """Return the chunks and the question; raises ConfigError when a prompt of them does not fit."""
    rng, subject = random.Random(_SEED), plan.subject
    if isinstance(subject, NamedModel):
        encoder = PromptEncoder(subject.load_tokenizer())
        texts = draw_real_texts(
            rng,
            encoder,
            chunks=plan.chunks,
            chunk_tokens=plan.chunk_tokens,
            question_tokens=plan.question_tokens,
            selector=plan.selector,
            name=DOCUMENT,
        )
        subject.check_prompt(texts.most_tokens)
        return texts
    vocabulary = subject.vocabulary
    chunks = draw_chunks(
        rng, plan.chunks, plan.chunk_tokens, vocabulary, selector=plan.selector, name=DOCUMENT
    )
    return Texts(chunks, draw_words(rng, plan.question_tokens, vocabulary), plan.prompt_tokens)


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Run ``call`` once and return its peak of additional bytes, None if unmeasurable.

    CUDA: the allocator's own peak, exact to the byte. Linux: the kernel's peak of the process's
    resident memory, reset before the call. That peak counts whole pages, other threads, and pages
    of files that the call maps. It misses memory that the allocator reuses from earlier work, so
    freed memory is first returned to the system.
    """
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(call, device)
    if _CLEAR.exists():
        return _resident_peak(call)
    return None


def _cuda_peak(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _resident_peak(call: Callable[[], object]) -> int | None:
    give_back_unused()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
