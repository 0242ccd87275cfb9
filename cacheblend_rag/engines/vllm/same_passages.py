"""Has vLLM compute in full, while it is idle, what several prompts with passages began with.

vLLM's own prefix cache then holds it, and the next prompt that begins so reuses it as exact KV.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.lifetime import IdleJob, IdleQueue
from cacheblend_rag.engines.prefixes import MOST_WAITING, Beginnings
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.vllm.protocol.job import Wish
from cacheblend_rag.engines.vllm.transport import Transport, VLLMRequest, until_over
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.prompt_pass import ALL_EXACT

STEP_TOKENS = 512
"""Other requests wait for the computation of so many tokens at most."""
IDLE = Wish(kind="idle")
ONE_TOKEN = ResolvedSampling(max_tokens=1)


class SamePassages:
    """An AnswerHook that has vLLM compute what prompts begin with, up to their last passage.

    engine: a VLLMEngine, may be a weak proxy. idle: runs the jobs. It is on if ``fill_on_miss`` is.
    """

    def __init__(self, engine: Any, idle: IdleQueue) -> None:
        self._engine, self._idle, self._beginnings = engine, idle, Beginnings()

    def see(self, request: Request, answer: Generation) -> None:
        """Queue what a blended prompt began with, if an earlier one began alike."""
        report, prompt, engine = answer.report, request.prepared, self._engine
        is_asked = engine.fill_on_miss and engine.status.vllm and request.config.reuse_prefix
        is_blended = report.blended and report.selector_reason != ALL_EXACT
        if not (is_asked and is_blended) or prompt.conversation_key:
            return
        end = max(chunk.start + chunk.tokens for chunk in report.chunks if chunk.hit)
        tokens, salt = tuple(prompt.token_ids[:end]), engine._salt(request)
        if self._beginnings.come_again((chunk_id(tokens), salt), end):
            steps = partial(self._computed, tokens, salt)
            job = IdleJob("prefix", steps, priority=-1, waits=False, most=MOST_WAITING)
            self._idle.add(job)

    def _computed(self, tokens: tuple[int, ...], salt: str | None) -> Generator[None, None, None]:
        """Have vLLM prefill tokens in steps, each a request that others go before."""
        transport = self._engine.transport
        for end in (*range(STEP_TOKENS, len(tokens), STEP_TOKENS), len(tokens)):
            request = VLLMRequest(tokens[:end], ONE_TOKEN, salt, IDLE)
            cancel = Cancellation(is_over=lambda: not self._engine.is_open)
            work = until_over(_sent(transport, request), cancel)
            yield from transport.background.stream(work, cancel)


async def _sent(transport: Transport, request: VLLMRequest) -> None:
    """Send a request, and wait until it is answered."""
    async for _ in transport.send(request, stream=False):
        pass
