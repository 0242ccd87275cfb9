"""Has each turn of a conversation filled in idle time, as the next chunks of its document."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from time import monotonic

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.idle import Activity, IdleJob, IdleQueue
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.conversation_kv import (
    ConversationKV,
    Filling,
    TurnDocument,
    common_prefix,
    gaps_between,
    turn_fingerprint,
)
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.text.encoder import PromptEncoder

KIND = "turn"
"""Of the idle jobs."""
PRIORITY = 1
"""Before missed chunks are computed: the conversation's next prompt may come soon."""
PATIENCE = 0.2
"""Seconds that a prompt waits for an engine that fills last: that may be much later, and to compute
a turn's tokens again takes about so long."""


class TurnKeeper:
    """An AnswerHook that adds turns to their conversations, and fills them by an IdleQueue.

    backend: computes and stores; may be a weak proxy. encoder: of its prompts. activity: of its
    requests.
    """

    def __init__(
        self, backend: Backend, encoder: PromptEncoder, activity: Activity, idle: IdleQueue
    ) -> None:
        self._backend, self._encoder = backend, encoder
        self._activity, self._idle = activity, idle

    def see(self, request: Request, answer: Generation) -> None:
        """Queue the turn of an answer, if it belongs to a conversation."""
        backend, conversation = self._backend, request.prepared.conversation
        is_whole = not request.full and answer.finish_reason != "cancelled"
        may_store = backend.keeps_turns and not backend.read_only
        may_store = may_store and backend.blend_refusal is None
        if conversation is None or not is_whole or not may_store:
            return
        fingerprint = turn_fingerprint(request.prepared.prepared_for.fingerprint)
        gone = self._added(conversation, request, answer, fingerprint)
        filling = self._filling()
        conversation.begin_filling(filling)
        job = IdleJob(
            KIND,
            partial(self._filled, conversation, filling, fingerprint, gone),
            priority=PRIORITY,
            ended=partial(conversation.end_filling, filling),
            waits=not backend.fills_last,
        )
        if not self._idle.add(job):
            conversation.end_filling(filling)

    def _added(
        self, conversation: ConversationKV, request: Request, answer: Generation, fingerprint: str
    ) -> list[KVKey]:
        """Add what follows the turns that are known; returns the keys of what it drops.

        Of the answer, the tokens that its text has in the next prompt.
        """
        prompt = request.prepared
        shown = self._encoder.chunk(answer.text.strip())
        tokens = (*prompt.token_ids, *common_prefix(answer.token_ids, shown))
        chunks = [(chunk.start, chunk.end) for chunk in prompt.placed]
        start = conversation.known_until(
            tokens, gaps_between(prompt.turns_start, chunks, prompt.question_start)
        )
        spans = gaps_between(max(start, prompt.turns_start), chunks, len(tokens))
        return conversation.add(
            [tokens[start:end] for start, end in spans],
            TurnDocument(
                fingerprint,
                lead=tokens[: prompt.turns_start],
                token_bytes=self._backend._token_bytes,
            ),
            self._backend._longest_run,
        )

    def _filling(self) -> Filling:
        """Return a function that says whether a turn that is queued now may be stored soon."""
        activity, fills_last, began = self._activity, self._backend.fills_last, monotonic()
        return lambda: activity.is_idle and not (fills_last and monotonic() > began + PATIENCE)

    # In the idle queue's thread

    def _filled(
        self,
        conversation: ConversationKV,
        filling: Filling,
        fingerprint: str,
        gone: Sequence[KVKey],
    ) -> Generator[None, None, None]:
        """Evict what was dropped, and store what is not stored of the conversation's turns."""
        key = conversation.key
        self._backend._evict_turns(gone, key)
        plans: Sequence[ChunkPlan] = ()
        try:
            for plans in conversation.plans(fingerprint):
                with closing(self._backend._fill(plans, key)) as steps:
                    for _ in steps:
                        yield
                        if conversation.is_forgotten(filling):
                            return
        finally:
            if conversation.is_forgotten(filling):
                self._backend._evict_turns([plan.key for plan in plans], key)
