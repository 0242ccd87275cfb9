"""Measures questions per second: blending, plain vLLM, and vLLM's prefix caching.

Each question draws some of the chunks, in random order, and all questions are sent at once. Every
engine is warmed up with questions over other chunks. Work that can be done before questions arrive
is not timed: chunk KV is precomputed for the blend, and with prefix caching every chunk is
requested alone, so that each question's first chunk is in its cache. The KV cache holds all
questions and chunks at once, in all three.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plans import ThroughputPlan
from cacheblend_rag.bench.vllm import running_vllm
from cacheblend_rag.bench.workload import ONE_TOKEN, draw_chunks, draw_words
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

SHARED_SALT = "prefix-caching"
WARM_UP_QUESTIONS = 2


@dataclass(frozen=True)
class _Workload:
    """Chunks, and prompts that use them."""

    chunks: Sequence[Chunk]
    prompts: Sequence[BlendPrompt]

    @classmethod
    def draw(cls, plan: ThroughputPlan, chunks: int, questions: int, seed: int) -> _Workload:
        rng = random.Random(seed)
        vocabulary = plan.model_shape.vocabulary
        drawn = draw_chunks(
            rng,
            chunks,
            plan.chunk_tokens,
            vocabulary,
            selector=plan.selector,
            name=f"bench-{seed}",
        )
        prompts = [
            BlendPrompt.of(
                *rng.sample(drawn, plan.drawn), draw_words(rng, plan.question_tokens, vocabulary)
            )
            for _ in range(questions)
        ]
        return cls(drawn, prompts)


def measure_throughput(plan: ThroughputPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return questions per second of each, their ratios, and the parameters."""
    advance("building the model")
    work = _Workload.draw(plan, plan.chunks, plan.questions, plan.seed)
    warm_up = _Workload.draw(plan, plan.drawn, WARM_UP_QUESTIONS, plan.seed + 1)
    with plan.setting.served_model() as folder:
        run = _Run(plan, folder, work, warm_up, advance)
        plain, prefix_caching = run.plain(), run.prefix_caching()
        blend, precompute_seconds = run.blend()
    return {
        "blend_rps": blend,
        "plain_rps": plain,
        "prefix_caching_rps": prefix_caching,
        "over_plain": blend / plain,
        "over_prefix_caching": blend / prefix_caching,
        "precompute_seconds": precompute_seconds,
        "shape": plan.shape,
        "questions": plan.questions,
        "chunks": plan.chunks,
        "drawn": plan.drawn,
        "prompt_tokens": plan.prompt_tokens,
        "answer_tokens": plan.answer_tokens,
        "selector": plan.selector,
        "selector_options": plan.options,
        "ratio": plan.ratio,
        "seed": plan.seed,
    }


@dataclass(frozen=True)
class _Run:
    plan: ThroughputPlan
    folder: Path | str
    work: _Workload
    warm_up: _Workload
    advance: Advance

    def plain(self) -> float:
        """Return questions per second of vLLM without connector and without prefix caching."""
        self.advance("plain vLLM")
        options = {**self._options(), "enable_prefix_caching": False}
        with running_vllm("vllm", self.folder, options=options, connector=False) as engine:
            return self._per_second(lambda prompt: engine.generate_full(prompt, self._sampling))

    def prefix_caching(self) -> float:
        """Return questions per second of vLLM with prefix caching, without connector."""
        self.advance("vLLM's prefix caching")
        with running_vllm("vllm", self.folder, options=self._options(), connector=False) as engine:
            for chunk in self.work.chunks:
                engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SHARED_SALT)
            return self._per_second(
                lambda prompt: engine.generate_full(prompt, self._sampling, cache_salt=SHARED_SALT)
            )

    def blend(self) -> tuple[float, float]:
        """Return questions per second of blending, and the seconds of precomputing the chunks."""
        plan = self.plan
        self.advance("blending")
        room = 2 * plan.model_shape.kv_bytes(
            (plan.chunks + plan.drawn) * plan.chunk_tokens, plan.torch_dtype
        )
        settings, options = ConnectorSettings(store=StoreConfig(host_bytes=room)), self._options()
        with running_vllm("vllm", self.folder, options=options, settings=settings) as engine:
            engine.precompute(self.warm_up.chunks, progress=False)
            report = engine.precompute(self.work.chunks, progress=False)
            return self._per_second(lambda prompt: self._blended(engine, prompt)), report.seconds

    def _blended(self, engine: VLLMEngine, prompt: BlendPrompt) -> Generation:
        generation = engine.generate(
            prompt, self._sampling, config=self.plan.blend_config(self.plan.ratio)
        )
        report = generation.report
        if not report.blended or not all(chunk.hit for chunk in report.chunks):
            raise CacheBlendError(f"a question was not blended: {report.reason or 'a miss'}")
        return generation

    def _per_second(self, ask: Callable[[BlendPrompt], Generation]) -> float:
        for prompt in self.warm_up.prompts:
            ask(prompt)
        prompts = self.work.prompts
        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            answers = list(pool.map(ask, prompts))
            seconds = time.perf_counter() - started
        if any(len(answer.token_ids) != self.plan.answer_tokens for answer in answers):
            raise CacheBlendError("an answer is shorter than was asked for")
        return len(prompts) / seconds

    def _options(self) -> dict[str, Any]:
        plan = self.plan
        tokens = plan.prompt_tokens + plan.answer_tokens
        chunk_prompts = -(-plan.chunks * plan.chunk_tokens // tokens)
        return plan.setting.options(tokens, plan.questions + chunk_prompts)

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams.greedy(max_tokens=self.plan.answer_tokens, ignore_eos=True)
