"""Questions per second in vLLM: blended, plain, and with vLLM's own prefix caching.

Each question draws some of the chunks, in random order, and all questions are sent at once. Work
that can be done before questions arrive is not timed: chunk KV is precomputed for the blend, and
with prefix caching every chunk is requested alone, so that each question's first chunk is in its
cache. The KV cache holds all questions and chunks at once, in all three.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import typer

from cacheblend_rag import BlendConfig
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
    vocabulary, rng = dimensions.vocabulary, random.Random(seed)
    sampling = SamplingParams.greedy(answer_tokens, ignore_eos=True)
    other, known = (
        draw_chunks(rng, count, chunk_tokens, vocabulary, selector=selector, name=name)
        for count, name in ((drawn, "warm-up"), (chunks, "bench"))
    )

    def prompts(of: list[Any], count: int) -> list[BlendPrompt]:
        return [
            BlendPrompt.of(*rng.sample(of, drawn), draw_words(rng, question_tokens, vocabulary))
            for _ in range(count)
        ]

    first, asked = prompts(other, WARM_UPS), prompts(known, questions)

    def per_second(ask: Callable[[BlendPrompt], Generation]) -> float:
        for prompt in first:
            ask(prompt)
        with ThreadPoolExecutor(questions) as pool:
            started = time.perf_counter()
            answers = list(pool.map(ask, asked))
            seconds = time.perf_counter() - started
        if any(len(answer.token_ids) != answer_tokens for answer in answers):
            raise CacheBlendError("an answer is shorter than was asked for")
        return questions / seconds

    prompt_tokens = drawn * chunk_tokens + question_tokens
    tokens = prompt_tokens + answer_tokens
    held = questions + -(-chunks * chunk_tokens // tokens)
    options = engine_options(dimensions, precision, tokens, held) | {"enforce_eager": eager}
    config = BlendConfig(recompute_ratio=ratio, selector=selector, min_tokens=0, reuse_prefix=False)
    with tempfile.TemporaryDirectory(prefix="cacheblend-model-") as folder:
        dimensions.save(Path(folder), dtype=precision, device=device)
        dimensions.build_tokenizer().save_pretrained(folder)  # a word a token
        _say("plain vLLM")
        off = {**options, "enable_prefix_caching": False, "kv_transfer_config": None}
        with running_vllm(folder, off) as engine:
            plain = per_second(lambda prompt: engine.generate_full(prompt, sampling))
        _say("vLLM's prefix caching")
        with running_vllm(folder, {**options, "kv_transfer_config": None}) as engine:
            for chunk in known:
                engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SALT)
            cached = per_second(
                lambda prompt: engine.generate_full(prompt, sampling, cache_salt=SALT)
            )
        _say("blending")
        room = 2 * dimensions.kv_bytes((chunks + drawn) * chunk_tokens, precision)
        settings = ConnectorSettings(store=StoreConfig(host_bytes=room))
        with running_vllm(folder, options, settings) as engine:
            engine.precompute(other, progress=False)
            precompute_seconds = engine.precompute(known, progress=False).seconds

            def blended(prompt: BlendPrompt) -> Generation:
                answer = engine.generate(prompt, sampling, config=config)
                if not answer.report.blended or not all(c.hit for c in answer.report.chunks):
                    raise CacheBlendError(f"not blended: {answer.report.reason or 'a miss'}")
                return answer

            blend = per_second(blended)
    found = {
        "blend_rps": blend,
        "plain_rps": plain,
        "prefix_caching_rps": cached,
        "over_plain": blend / plain,
        "over_prefix_caching": blend / cached,
        "precompute_seconds": precompute_seconds,
        "shape": shape,
        "questions": questions,
        "chunks": chunks,
        "drawn": drawn,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "selector": selector,
        "ratio": ratio,
    }
    print(json.dumps(found, indent=1))


def _say(label: str) -> None:
    """Tell what is done next."""
    print(label, file=sys.stderr)


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
