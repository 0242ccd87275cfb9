"""Questions per second in vLLM: blended, plain, and with vLLM's own prefix caching.

Each question draws some of the chunks, in random order, and all questions are sent at once. Work
that can be done before questions arrive is not timed: chunk KV is precomputed for the blend, and
with prefix caching every chunk is requested alone, so that each question's first chunk is in its
cache. The KV cache holds all questions and chunks at once, in all three.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cacheblend_rag.bench.plans import TtftPlan
from cacheblend_rag.bench.vllm import engine_options, running_vllm, served_model
from cacheblend_rag.bench.workload import ONE_TOKEN, draw_chunks, draw_words
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.command import run, say

SALT = "prefix-caching"
WARM_UPS = 2


def measure(
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
) -> dict[str, Any]:
    """Return questions per second of each, their ratios, and the parameters."""
    plan = TtftPlan(
        shape=shape, dtype=dtype, device=device, eager=eager, chunks=drawn,
        chunk_tokens=chunk_tokens, question_tokens=question_tokens, selector=selector,
        ratios=(ratio,), engine="vllm",
    )  # fmt: skip
    vocabulary, rng = plan.model_shape.vocabulary, random.Random(seed)
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

    tokens = plan.prompt_tokens + answer_tokens
    options = engine_options(plan, tokens, questions + -(-chunks * chunk_tokens // tokens))
    with served_model(plan) as folder:
        say("plain vLLM")
        off = {**options, "enable_prefix_caching": False}
        with running_vllm("vllm", folder, options=off, connector=False) as engine:
            plain = per_second(lambda prompt: engine.generate_full(prompt, sampling))
        say("vLLM's prefix caching")
        with running_vllm("vllm", folder, options=options, connector=False) as engine:
            for chunk in known:
                engine.generate_full(BlendPrompt.of(chunk), ONE_TOKEN, cache_salt=SALT)
            cached = per_second(
                lambda prompt: engine.generate_full(prompt, sampling, cache_salt=SALT)
            )
        say("blending")
        room = 2 * plan.model_shape.kv_bytes((chunks + drawn) * chunk_tokens, plan.torch_dtype)
        settings = ConnectorSettings(store=StoreConfig(host_bytes=room))
        with running_vllm("vllm", folder, options=options, settings=settings) as engine:
            engine.precompute(other, progress=False)
            precompute_seconds = engine.precompute(known, progress=False).seconds
            config = plan.blend_config(ratio).with_changes(cost_model=True)

            def blended(prompt: BlendPrompt) -> Generation:
                answer = engine.generate(prompt, sampling, config=config)
                if not answer.report.blended or not all(c.hit for c in answer.report.chunks):
                    raise CacheBlendError(f"not blended: {answer.report.reason or 'a miss'}")
                return answer

            blend = per_second(blended)
    return {
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
        "prompt_tokens": plan.prompt_tokens,
        "answer_tokens": answer_tokens,
        "selector": selector,
        "ratio": ratio,
    }


if __name__ == "__main__":
    run(measure)
