"""Questions per second in vLLM: blended, plain, and with vLLM's own prefix caching.

Each question draws some of the chunks, in random order, and all questions are sent at once. Work
that can be done before questions arrive is not timed: chunk KV is precomputed for the blend, and
with prefix caching every chunk is requested alone, so that each question's first chunk is in its
cache. The KV cache holds all questions and chunks at once, in all three.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer

from cacheblend_rag import BlendConfig, Engine
from cacheblend_rag.bench.workload import LEAD_IN, ONE_TOKEN
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.loading import named_dtype
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import InProcessVLLM
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.shapes import ModelShape, draw_chunks, draw_words, named_shape

SALT = "prefix-caching"
WARM_UPS = 2
PLAIN = BlendConfig(min_tokens=0, reuse_prefix=False)
Ask = Callable[[BlendPrompt], Generation]
SPARE_TOKENS, BLOCK_TOKENS, GPU_SHARE = 256, 128, 0.9


def main(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    device: str = "cpu",
    eager: bool = False,
    questions: int = 64,
    chunks: int = 40,
    drawn: int = 6,
    chunk_tokens: int = 512,
    question_tokens: int = 32,
    answer_tokens: int = 8,
    selector: str = "hkvd",
    ratio: float = 0.15,
    seed: int = 7,
) -> None:
    """Print questions per second of each, their ratios, and the parameters, as JSON."""
    dimensions, precision = named_shape(shape), named_dtype(dtype)
    load = Load(dimensions, questions, chunks, drawn, chunk_tokens, question_tokens, answer_tokens)
    config = PLAIN.with_changes(recompute_ratio=ratio, selector=selector)
    with tempfile.TemporaryDirectory(prefix="cacheblend-model-") as folder:
        dimensions.save(Path(folder), dtype=precision, device=device)
        dimensions.build_tokenizer().save_pretrained(folder)  # a word a token
        rows = list(load.rows(folder, precision, config, (math.inf,), seed, enforce_eager=eager))
    plain, cached, blend = (row["per_second"] for row in rows)
    found = {
        "blend_rps": blend,
        "plain_rps": plain,
        "prefix_caching_rps": cached,
        "over_plain": blend / plain,
        "over_prefix_caching": blend / cached,
        "precompute_seconds": rows[-1]["precompute_seconds"],
        "shape": shape,
        "questions": questions,
        "chunks": chunks,
        "drawn": drawn,
        "prompt_tokens": load.prompt_tokens,
        "answer_tokens": answer_tokens,
        "selector": selector,
        "ratio": ratio,
    }
    print(json.dumps(found, indent=1))


@dataclass(frozen=True)
class Load:
    """Questions over so many chunks, of which each prompt draws some."""

    shape: ModelShape
    questions: int
    chunks: int
    drawn: int
    chunk_tokens: int = 512
    question_tokens: int = 32
    answer_tokens: int = 8

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.drawn * self.chunk_tokens + self.question_tokens

    def rows(
        self,
        folder: str,
        dtype: torch.dtype,
        config: BlendConfig,
        rates: Sequence[float],
        seed: int = 7,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yield what plain vLLM, its prefix caching and blends do, in this order, at each rate.

        Args:
            folder: the model's.
            dtype: of its weights.
            config: of blends.
            rates: questions sent per second; infinity sends all at once.
            seed: of chunks and questions.
            options: further arguments of vLLM's engine.
        """
        rng = random.Random(seed)
        other, known = (
            draw_chunks(
                rng, count, self.chunk_tokens, self.shape.vocabulary,
                selector=config.selector, name=name,
            )
            for count, name in ((self.drawn, "warm-up"), (self.chunks, "bench"))
        )  # fmt: skip
        first = self._prompts(rng, other, WARM_UPS)
        asked = [(rate, self._prompts(rng, known, self.questions)) for rate in rates]
        tokens = self.prompt_tokens + self.answer_tokens
        held = self.questions + -(-self.chunks * self.chunk_tokens // tokens)
        options = engine_options(self.shape, dtype, tokens, held) | options
        sampling = SamplingParams.greedy(self.answer_tokens, ignore_eos=True)

        def measured(way: str, ask: Ask) -> Iterator[dict[str, Any]]:
            print(way, file=sys.stderr)
            for prompt in first:
                ask(prompt)
            for rate, prompts in asked:
                yield {"way": way, "rate": rate, **self._measured(ask, prompts, rate, rng)}

        off = {**options, "enable_prefix_caching": False, "kv_transfer_config": None}
        with running_vllm(folder, off) as engine:
            yield from measured("plain", lambda prompt: engine.generate_full(prompt, sampling))
        with running_vllm(folder, {**options, "kv_transfer_config": None}) as engine:
            for chunk in known:
                engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SALT)
            yield from measured(
                "prefix caching",
                lambda prompt: engine.generate_full(prompt, sampling, cache_salt=SALT),
            )
        room = 2 * self.shape.kv_bytes((self.chunks + self.drawn) * self.chunk_tokens, dtype)
        settings = ConnectorSettings(store=StoreConfig(host_bytes=room))
        with running_vllm(folder, options, settings) as engine:
            engine.precompute(other, progress=False)
            seconds = engine.precompute(known, progress=False).seconds
            for row in measured("blend", lambda prompt: blended(engine, prompt, sampling, config)):
                yield {**row, "precompute_seconds": seconds}

    def _prompts(self, rng: random.Random, of: list[Any], count: int) -> list[BlendPrompt]:
        return [
            BlendPrompt.of(
                *rng.sample(of, self.drawn),
                draw_words(rng, self.question_tokens, self.shape.vocabulary),
            )
            for _ in range(count)
        ]

    def _measured(
        self, ask: Ask, prompts: Sequence[BlendPrompt], rate: float, rng: random.Random
    ) -> dict[str, Any]:
        """Send prompts at random intervals; returns questions per second and times to a token."""
        gaps = [0.0 if math.isinf(rate) else rng.expovariate(rate) for _ in prompts]
        started = time.perf_counter()

        def wait_and_ask(prompt: BlendPrompt, at: float) -> Generation:
            time.sleep(max(0.0, started + at - time.perf_counter()))
            return ask(prompt)

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(wait_and_ask, prompts, accumulate(gaps)))
        seconds = time.perf_counter() - started
        if any(len(answer.token_ids) != self.answer_tokens for answer in answers):
            raise CacheBlendError("an answer is shorter than was asked for")
        waits = sorted(answer.report.seconds.time_to_first_token for answer in answers)
        return {
            "per_second": len(prompts) / seconds,
            "median_ttft_ms": 1e3 * median(waits),
            "longest_ttft_ms": 1e3 * waits[-1],
        }


def blended(
    engine: Engine, prompt: BlendPrompt, sampling: SamplingParams, config: BlendConfig
) -> Generation:
    """Return an answer; raises CacheBlendError if not all of the prompt's chunks were reused."""
    answer = engine.generate(prompt, sampling, config=config)
    if not answer.report.blended or not all(chunk.hit for chunk in answer.report.chunks):
        raise CacheBlendError(f"not blended: {answer.report.reason or 'a miss'}")
    return answer


def engine_options(
    shape: ModelShape, dtype: torch.dtype, prompt_tokens: int, prompts: int
) -> dict[str, Any]:
    """Return engine arguments with which vLLM holds so many prompts, of so many tokens each."""
    window = -(-(prompt_tokens + SPARE_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
    share = {"gpu_memory_utilization": GPU_SHARE} if torch.cuda.is_available() else {}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": min(shape.max_positions, window),
        "kv_cache_memory_bytes": shape.kv_bytes(window * prompts, dtype),
        "disable_log_stats": True,
        **share,
    }


def running_vllm(
    folder: str, options: dict[str, Any], settings: ConnectorSettings | None = None
) -> closing[VLLMEngine]:
    """Return an engine over vLLM in this process, to be closed; all compute on the same cores."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return closing(VLLMEngine(InProcessVLLM(folder, settings, **options), lead_in=LEAD_IN))


if __name__ == "__main__":
    typer.run(main)
