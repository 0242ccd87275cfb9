"""Computes and stores in idle time what requests missed, and what conversations said.

A corpus too large to precompute is filled by its traffic: the chunks that a prompt missed become an
IdleJob after its answer; those that have waited longest come first.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from time import monotonic

from cacheblend_rag.engines.answer import Generation, Request
from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.indexing import Indexing
from cacheblend_rag.engines.lifetime import Activity, IdleJob, IdleQueue
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.conversation_kv import (
    ConversationKV,
    TurnDocument,
    common_prefix,
    gaps_between,
    turn_fingerprint,
)
from cacheblend_rag.prefill.conversation_kv import (
    Filling as TurnFilling,
)
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.reason import Miss, ReasonCode
from cacheblend_rag.report import FillReport, PrecomputeReport
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder

FILLED = frozenset({ReasonCode.NOT_STORED, ReasonCode.OTHER_MODEL})
"""Miss reasons of chunks that are filled."""


@dataclass(eq=False)
class _Missed:
    """What a prompt missed; untold: how many of the chunks no result is known of."""

    chunks: Mapping[KVKey, Chunk]
    untold: int


class Filling:
    """An AnswerHook that has the chunks that prompts missed filled by an IdleQueue.

    engine: computes and stores; may be a weak proxy. is_on: whether newly missed chunks are queued.
    """

    def __init__(self, engine: Indexing, idle: IdleQueue) -> None:
        self.is_on = False
        self._engine, self._idle = engine, idle
        self._lock = Lock()
        self._waiting: set[KVKey] = set()
        self._done, self._dropped = PrecomputeReport(), 0

    def see(self, request: Request, answer: Generation) -> Generation | None:
        """Queue the chunks that a prompt missed; returns the answer with updated reports."""
        if not self.is_on or self._engine.read_only:
            return None
        prepared, chunks = request.prepared, answer.report.chunks
        starts = {chunk.start for chunk in chunks if chunk.reason_code in FILLED}
        missed = {
            placed.start: (placed.key, span.chunk)
            for placed, span in zip(prepared.placed, prepared.encoded.spans, strict=True)
            if placed.start in starts and self._engine._known.has(span.chunk)
        }
        filled = self._queue(dict(missed.values()))
        told = {start for start, (key, _) in missed.items() if key in filled}
        chunks = tuple(
            replace(chunk, reason=Miss.BEING_FILLED)
            if chunk.reason_code == ReasonCode.NOT_STORED and chunk.start in told
            else chunk
            for chunk in chunks
        )
        return replace(answer, report=replace(answer.report, chunks=chunks))

    def report(self) -> FillReport:
        """Return the counts so far."""
        with self._lock:
            counted = vars(self._done)
            return FillReport(**counted, waiting=len(self._waiting), dropped=self._dropped)

    def _queue(self, missed: Mapping[KVKey, Chunk]) -> Set[KVKey]:
        """Queue chunks that do not wait already; returns the keys of those that will be filled."""
        with self._lock:
            chunks = {key: one for key, one in missed.items() if key not in self._waiting}
            new = _Missed(chunks, len(chunks))
            job = IdleJob(
                "fill",
                partial(self._filled, new),
                ended=partial(self._ended, new),
                waits=not self._engine.fills_last,
            )
            if chunks and self._idle.add(job):
                self._waiting |= chunks.keys()
            else:
                self._dropped += len(chunks)
            return self._waiting & missed.keys()

    # In the idle queue's thread

    def _filled(self, missed: _Missed) -> Generator[None, None, None]:
        """Fill chunks, each document's one after the other."""
        started = time.perf_counter()
        chunks = sorted(
            missed.chunks.values(),
            key=lambda one: (one.document_id or "", one.collection, len(one.context)),
        )
        try:
            with closing(self._engine._fill_missed(chunks)) as steps:
                for done in steps:
                    missed.untold -= done.chunks
                    with self._lock:
                        self._done += done
                    yield
        finally:
            with self._lock:
                self._done += PrecomputeReport(seconds=time.perf_counter() - started)

    def _ended(self, missed: _Missed) -> None:
        with self._lock:
            self._waiting -= missed.chunks.keys()
            self._dropped += max(0, missed.untold)


# The turns of conversations, as the next chunks of their documents

PRIORITY = 1
"""Before missed chunks are computed: the conversation's next prompt may come soon."""
PATIENCE = 0.2
"""Seconds that a prompt waits for KV of the last turn to be stored; computing the turn again would
take about as long."""


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
            "turn",
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

    def _filling(self) -> TurnFilling:
        """Return a function that says whether a turn that is queued now may be stored soon."""
        activity, fills_last, began = self._activity, self._backend.fills_last, monotonic()
        return lambda: activity.is_idle and not (fills_last and monotonic() > began + PATIENCE)

    # In the idle queue's thread

    def _filled(
        self,
        conversation: ConversationKV,
        filling: TurnFilling,
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
