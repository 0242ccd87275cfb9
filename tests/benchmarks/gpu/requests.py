"""An engine on random weights, and requests of which each has another length.

A request that repeats an earlier one's shapes hides whatever is planned or compiled for each shape,
so no two prompts here have equally many tokens.
"""

from __future__ import annotations

import gc
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from cacheblend_rag import Engine
from cacheblend_rag.bench.workload import LEAD_IN, ONE_TOKEN
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.report import PREFILL_PHASES
from cacheblend_rag.settings import BlendConfig, StoreConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.shapes import TOY, ModelShape, draw_chunks, draw_words, named_shape

T = TypeVar("T")
Row = dict[str, Any]
"""One measured case: plain values by name. ``failed`` says why a case has no figures."""

SEED = 7
REAL_CHUNK, TOY_CHUNK = 512, 48
REAL_CHUNKS, TOY_CHUNKS = (8, 16, 32), (3,)
REPEAT, TOY_REPEAT = 3, 1
HOST = "host://?capacity=none"
SHORTEST_QUESTION = 33
TRACEBACK_CHARACTERS = 3000
WARM_UPS = 4
"""Blends before those that are measured: kernels are compiled, and layers captured as graphs."""
PLAIN = BlendConfig(
    selector="hkvd", check_layers=(1,), min_tokens=0, reuse_prefix=False, cost_model=False
)


def _case(selector: str, ratio: float) -> BlendConfig:
    return PLAIN.with_changes(selector=selector, recompute_ratio=ratio)


CASES: Mapping[str, BlendConfig] = {
    "hkvd 0.15": _case("hkvd", 0.15),
    "hkvd 0.05": _case("hkvd", 0.05),
    "before layer 0, 0.15": _case("random", 0.15),
    "before layer 0, 0.05": _case("random", 0.05),
    "question_mid 0.15": _case("question_mid", 0.15),
    "reuse only, 0": _case("hkvd", 0.0),
    "all tokens, 1": _case("hkvd", 1.0),
}
"""Blends that are measured. ``random`` stands for all selectors that choose before layer 0 at no
cost: with random weights it does not matter which rows are chosen."""


@dataclass(frozen=True)
class Scene:
    """What is measured on.

    name: of the model's shape; of TOY, everything is tiny. folder: of files that all steps share.
    """

    name: str
    folder: str = ""

    @property
    def is_toy(self) -> bool:
        """Whether everything is tiny."""
        return self.name == TOY.name

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return TOY if self.is_toy else named_shape(self.name)

    @property
    def has_cuda(self) -> bool:
        """Whether there is a CUDA device."""
        return torch.cuda.is_available()

    @property
    def device(self) -> torch.device:
        """The first CUDA device, or the CPU."""
        return torch.device("cuda", 0) if self.has_cuda else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The data type of weights and KV."""
        return torch.bfloat16 if self.has_cuda else torch.float32

    @property
    def chunk_tokens(self) -> int:
        """How many tokens each chunk has."""
        return self.pick(REAL_CHUNK, TOY_CHUNK)

    def pick(self, real: T, toy: T) -> T:
        """Return the second value if everything is tiny."""
        return toy if self.is_toy else real

    def build_model(self) -> PreTrainedModel:
        """Return the whole model with random weights, on the device."""
        return self.shape.build_model(dtype=self.dtype, device=self.device)


@dataclass
class Requests:
    """An engine whose store holds chunks in one tier, and the questions asked of it.

    engine: the embedded one, or vLLM's. tier: the name that reports must give for every chunk.
    """

    scene: Scene
    engine: Engine
    chunks: list[Chunk]
    tier: str
    vocabulary: int
    _random: random.Random = field(default_factory=lambda: random.Random(SEED))
    _lengths: Iterator[int] = field(default_factory=lambda: count(SHORTEST_QUESTION))

    def prompt(self, chunks: int) -> BlendPrompt:
        """Return a prompt of so many chunks, of a length that no earlier one had."""
        question = draw_words(self._random, next(self._lengths), self.vocabulary)
        return BlendPrompt.of(*self._random.sample(self.chunks, chunks), question)

    def ordinary(self, prompt: BlendPrompt) -> Generation:
        """Return the first token by the model's own prefill."""
        return self.engine.generate_full(prompt, ONE_TOKEN)

    def blend(
        self, prompt: BlendPrompt, config: BlendConfig, sampling: SamplingParams = ONE_TOKEN
    ) -> Generation:
        """Return the answer by a blend; raises CacheBlendError if it was none."""
        done = self.engine.generate(prompt, sampling, config=config)
        report = done.report
        if not report.blended or any(chunk.tier != self.tier for chunk in report.chunks):
            raise CacheBlendError(f"not blended from {self.tier}: {report.reason or 'a miss'}")
        return done

    def compared(self, chunks: int, config: BlendConfig, repeat: int) -> Row:
        """Return medians of a blend and of ordinary prefill of the same prompts, in turn.

        ``first_blend_ms`` is that of the first of several before. ``runs``: tokens, ordinary and
        blend milliseconds of each pair. The phases are those of the blend with the median time.
        """
        warm_ups = [self.prompt(chunks) for _ in range(WARM_UPS)]
        first, *_ = [self.blend(prompt, config) for prompt in warm_ups]
        self.ordinary(warm_ups[0])
        pairs = [self._pair(chunks, config, turn) for turn in range(repeat)]
        ordinary = median(map(_seconds, (one for one, _ in pairs)))
        blends = sorted((blend for _, blend in pairs), key=_seconds)
        middle = blends[len(blends) // 2]
        return {
            "blend_ms": milliseconds(_seconds(middle)),
            "ordinary_ms": milliseconds(ordinary),
            "speedup": round(ordinary / _seconds(middle), 3),
            "compute_share": round(middle.report.compute_share, 4),
            "first_blend_ms": milliseconds(_seconds(first)),
            **_phases(middle),
            "runs": [
                [one.prompt_tokens, milliseconds(_seconds(one)), milliseconds(_seconds(blend))]
                for one, blend in pairs
            ],
        }

    def _pair(self, chunks: int, config: BlendConfig, turn: int) -> tuple[Generation, Generation]:
        """Return one prompt's answers by ordinary prefill and by a blend, which begins in turn."""
        prompt = self.prompt(chunks)
        if turn % 2:
            blend = self.blend(prompt, config)
            return self.ordinary(prompt), blend
        ordinary = self.ordinary(prompt)
        return ordinary, self.blend(prompt, config)


def _seconds(done: Generation) -> float:
    return done.report.seconds.time_to_first_token


def _phases(done: Generation) -> dict[str, Any]:
    seconds = done.report.seconds
    names = (*PREFILL_PHASES, "load_hidden")
    return {f"{name}_ms": milliseconds(getattr(seconds, name)) for name in names}


def milliseconds(seconds: float) -> float:
    """Return seconds as milliseconds, rounded."""
    return round(1e3 * seconds, 4)


@contextmanager
def open_requests(
    scene: Scene, model: PreTrainedModel, url: str, tier: str, chunks: int
) -> Iterator[Requests]:
    """Yield an engine whose store has stored so many chunks in one tier.

    url: of the tier. tier: its name.
    """
    shape, drawn = scene.shape, draw_bench_chunks(scene, chunks)
    config = StoreConfig(tiers=(url,))
    with TieredKVStore.of(config, device=scene.device) as store:
        engine = TransformersEngine(
            model, tokenizer=shape.build_tokenizer(), lead_in=LEAD_IN, store=store
        )
        if engine.blend_refusal is not None:
            raise CacheBlendError(f"the model cannot be blended: {engine.blend_refusal}")
        engine.precompute(drawn, progress=False)
        yield Requests(scene, engine, drawn, tier, shape.vocabulary)


def draw_bench_chunks(scene: Scene, chunks: int) -> list[Chunk]:
    """Return so many chunks of random words, the same ones each time."""
    return draw_chunks(
        random.Random(SEED), chunks, scene.chunk_tokens, scene.shape.vocabulary,
        selector=PLAIN.selector, name="bench",
    )  # fmt: skip


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """Return a row with what ``measure`` returns, or with the traceback of why it failed."""
    print(row, file=sys.stderr, flush=True)
    try:
        return {**row, **measure()}
    except Exception:  # whatever a kernel, a driver or a lack of memory raises
        failed = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
    gc.collect()  # what the failed case held
    torch.cuda.empty_cache()
    return {**row, "failed": failed}
