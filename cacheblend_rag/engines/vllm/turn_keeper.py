"""Has vLLM keep the KV of conversations' turns while it does nothing else.

vLLM frees a request's blocks with its last token, so a turn's KV is computed again, by a blend pass
over the prompt and its answer.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.engines.answer import Request
from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.guard import as_served
from cacheblend_rag.engines.idle import IdleJob, IdleQueue
from cacheblend_rag.engines.lifetime import Lifetime
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.turns import answered_prompt, config_for, hits_of
from cacheblend_rag.engines.vllm.job_client import JobClient
from cacheblend_rag.engines.vllm.protocol.job import SentSegment
from cacheblend_rag.engines.vllm.protocol.result import ConnectorStatus, Failed
from cacheblend_rag.engines.vllm.transport import until_over
from cacheblend_rag.errors import CacheBlendError, EngineUnavailableError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.conversation_kv import ConversationKV, KeptTurn, TurnSegment
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.report import PrefillReport
from cacheblend_rag.settings import BlendConfig

logger = logging.getLogger(__name__)

KIND = "keep"
"""Of the idle jobs."""
PRIORITY = 1
"""Before missed chunks are computed: the conversation's next prompt may come soon."""
PATIENCE = 0.2
"""Seconds that a prompt waits for the turn before it. On a busy vLLM that may be kept much later,
and to compute its tokens again takes about so long."""


@dataclass(frozen=True)
class TurnKeeper:
    """Sends an engine's ``keep`` jobs. jobs, background, idle, lifetime: the engine's."""

    jobs: JobClient
    background: BackgroundLoop
    idle: IdleQueue
    lifetime: Lifetime

    def keep(
        self,
        request: Request,
        answer: Sequence[int],
        prefill: PrefillReport,
        status: ConnectorStatus,
    ) -> None:
        """Queue the turn of a request, if it belongs to a conversation.

        Args:
            request: that was answered.
            answer: its tokens, as far as known.
            prefill: says which parts of the prompt were reused.
            status: the connector's.
        """
        prompt, conversation = request.prepared, request.prepared.conversation
        if conversation is None or request.full or not request.config.reuse_prefix:
            return
        held, hits = (*prompt.token_ids, *answer), hits_of(prompt, prefill.chunks)
        answered = answered_prompt(
            prompt,
            prefill.chunks,
            held,
            is_exact=status.keeps_exact,
            token_bytes=status.token_bytes,
        )
        segments = answered.segments()
        if not segments:
            return
        config = config_for(as_served(request.config, prefill.ratio), hits, len(held))
        turn = conversation.begin(segments, patience=PATIENCE)
        work = _Keeping(self, conversation, turn, segments, held, hits, config)
        job = IdleJob(
            KIND,
            work.steps,
            priority=PRIORITY,
            when_failed="turns of conversations are not kept",
            ended=work.end,
            waits=False,  # vLLM does it last
        )
        if not self.idle.add(job):
            work.end()

    def evict(self, keys: Sequence[KVKey], level: int = logging.WARNING) -> None:
        """Drop KV of conversations, without waiting; level: of what is logged if it fails."""

        async def evict() -> None:
            try:
                await self.jobs.evict(keys, turns=True)
            except CacheBlendError as error:
                logger.log(level, "%s", error)

        if keys and self.background.is_open:
            self.background.start(evict())


@dataclass
class _Keeping:
    """One turn on its way into the store.

    keeper: of its engine. conversation, turn, segments: what is kept. tokens: of the prompt and its
    answer. hits: the prompt's parts whose KV was reused. stored: keys of the segments that are
    stored, or may be, by what is known.
    """

    keeper: TurnKeeper
    conversation: ConversationKV
    turn: KeptTurn
    segments: Sequence[TurnSegment]
    tokens: Sequence[int]
    hits: Sequence[PlacedChunk]
    config: BlendConfig
    stored: set[KVKey] = field(default_factory=set)

    def steps(self) -> Generator[None, None, None]:
        """Have vLLM store the segments; raises EngineUnavailableError when it does not.

        A turn is left out if another one was begun meanwhile, which holds its tokens, too.
        """
        if not self.conversation.is_newest(self.turn):
            return
        keys = self.conversation.keys_of(self.segments)
        self.stored = set(keys)  # perhaps, from now on: of what is abandoned, all may be evicted
        try:
            yield from self._sent(keys)
        except Exception:
            self.stored = set()
            self.keeper.evict(keys, logging.DEBUG)  # the error is told
            raise

    def _sent(self, keys: Sequence[KVKey]) -> Generator[None, None, None]:
        kept = [
            SentSegment(one.start, one.start + len(one.token_ids), key.context_id)
            for one, key in zip(self.segments, keys, strict=True)
        ]
        work: Coroutine[Any, Any, Any] = self.keeper.jobs.keep(
            self.tokens, self.hits, kept, self.config
        )
        cancel = Cancellation(is_over=self._is_over)
        for result in self.keeper.background.stream(until_over(work, cancel), cancel):
            if isinstance(result, Failed):
                raise EngineUnavailableError(f"vLLM did not keep a turn: {result.error}")
            pairs = zip(self.segments, keys, strict=True)
            self.stored = {key for one, key in pairs if one.start in result.kept}
            yield

    def _is_over(self) -> bool:
        return not self.keeper.lifetime.is_open or self.conversation.is_forgotten(self.turn)

    def end(self) -> None:
        """Tell the conversation what is stored, and evict what it gives up."""
        self.keeper.evict(self.conversation.written(self.turn, self.stored))
