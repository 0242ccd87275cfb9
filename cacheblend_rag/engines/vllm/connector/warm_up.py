"""Compiles kernels when a worker starts, and counts those that are compiled later."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._dynamo.callback import callback_handler

from cacheblend_rag.engines.vllm.connector.job_runner import JobRunner
from cacheblend_rag.engines.vllm.connector.metadata import Allotted
from cacheblend_rag.engines.vllm.protocol import BlendJob, SentChunk, SentLeadIn
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.settings import BlendConfig

CHUNK_TOKENS = (32, 37)
"""Of the chunks of a made-up prompt. Triton compiles multiples of 16 by themselves."""
TEXT_TOKENS = 5
"""Before, between and after them."""
LEAD_IN = SentLeadIn("none", "", 0)
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.3, cost_model=False)


@torch.inference_mode()
def warm_up(jobs: JobRunner) -> None:
    """Store and blend made-up chunks, so that no request waits for kernels to be compiled.

    Call it while no request holds blocks: it writes into some.
    """
    with TieredKVStore.open(precision=jobs.store.precision) as store:
        own = JobRunner(jobs.stack, jobs.cache, store, namespace="", mode=jobs.mode)
        prompt, placed = [1] * TEXT_TOKENS, list[SentChunk]()
        for tokens in CHUNK_TOKENS:
            chunk = [token % 2 for token in range(tokens)]
            _run(own, BlendJob("precompute", LEAD_IN, (SentChunk(0, tokens),)), chunk)
            placed.append(SentChunk(len(prompt), len(prompt) + tokens))
            prompt += [*chunk, *[1] * TEXT_TOKENS]
            _run(own, BlendJob("blend", LEAD_IN, tuple(placed), config=CONFIG), prompt)


def _run(jobs: JobRunner, job: BlendJob, tokens: list[int]) -> None:
    blocks = tuple(map(tuple, jobs.cache.first_blocks(len(tokens))))
    allotted = Allotted("warm-up", job, tuple(tokens), 0, job.chunks[-1].end, blocks)
    source = jobs.source(allotted)
    try:
        for _ in jobs.work(allotted, source):
            pass
    finally:
        source.close()


class Compilations:
    """Counts what torch.compile and Triton compile within its ``with`` blocks.

    Triton has one hook, which vLLM may use, too: it is called as well.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        callback_handler.register_start_callback(self._note)
        self._triton = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        if self._triton is not None:
            self._theirs = self._triton.jit_post_compile_hook
            self._triton.jit_post_compile_hook = self._note_kernel

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._note)
        if self._triton is not None:
            self._triton.jit_post_compile_hook = self._theirs

    def _note(self, _: Any) -> None:
        self.count += 1

    def _note_kernel(self, *given: Any, **named: Any) -> Any:
        self.count += 1
        return self._theirs(*given, **named) if self._theirs is not None else None
