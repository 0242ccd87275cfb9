"""Blends compared with vLLM's own prefill: its log-probabilities of an answer's tokens."""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from typing import Any

from cacheblend_rag import BlendPrompt
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import vllm_sampling
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS, retrieved

SHORT = ResolvedSampling(max_tokens=6)
SOME = 0.3


def logprobs(engine: VLLMEngine, request: VLLMRequest) -> list[float]:
    """Greedy tokens' log-probabilities, as vLLM itself returns them."""
    sampling = vllm_sampling(request)
    sampling.logprobs, sampling.ignore_eos = 1, True

    async def run() -> list[float]:
        found: list[float] = []
        async for step in _outputs(engine, request, sampling):
            out = step.outputs[0]
            found += [
                top[token].logprob for top, token in zip(out.logprobs, out.token_ids, strict=True)
            ]
        return found

    return engine.transport.run(run())


def _outputs(engine: Any, request: VLLMRequest, sampling: Any) -> Any:
    if isinstance(engine, InProcessEngine):
        return engine.vllm.outputs(request, sampling)
    prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": request.salt}
    return engine.transport.vllm.generate(prompt, sampling, uuid.uuid4().hex)


def difference(engine: VLLMEngine, prompt: BlendPrompt, ratio: float) -> float:
    """Largest difference of log-probabilities between a blended prompt and ordinary prefill.

    Neither is served by vLLM's prefix cache.
    """
    config = engine.config.with_changes(recompute_ratio=ratio)
    asked = request_of(engine, prompt, SHORT, config)
    blend = replace(asked, salt=uuid.uuid4().hex)
    plain = VLLMRequest(asked.token_ids, SHORT, uuid.uuid4().hex)
    pairs = zip(logprobs(engine, blend), logprobs(engine, plain), strict=True)
    return max(abs(a - b) for a, b in pairs)


def index(engine: InProcessEngine) -> None:
    report = engine.precompute(DOCUMENTS, progress=False)
    assert (report.computed, report.refused) == (4, {})


def check_exact(engine: InProcessEngine, seed: int = 9, rounding: float = 0.0) -> None:
    """Ratio 1 is ordinary prefill; less is not, and is blended all the same."""
    prompt = retrieved(seed=seed)
    assert difference(engine, prompt, 1.0) <= rounding
    reused = difference(engine, prompt, 0.0)
    assert reused > 1e-4, "plain reuse of moved chunks is never exact"
    assert math.isfinite(reused)
    some = engine.generate(prompt, SHORT, config=engine.config.with_changes(recompute_ratio=SOME))
    assert [chunk.hit for chunk in some.report.chunks] == [True] * 3
    assert some.report.recomputed_tokens > 0
