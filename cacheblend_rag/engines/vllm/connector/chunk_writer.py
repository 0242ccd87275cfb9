"""Writes new chunk KV, and a conversation's turns, to a store on a separate thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from cacheblend_rag.blend import BlendPass, FusedKV
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.question_probe import REUSE_ONLY
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.vllm.protocol.result import KeepResult
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.openmp import use_one_thread
from cacheblend_rag.prefill.prefix import KVPart
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass
from cacheblend_rag.reason import Reason

MOST_WAITING = 8
"""Most chunks of one job that are computed but not written; they take memory."""
WAIT_SECONDS = 0.001


class ChunkWriter:
    """Writes one job's chunks, in order, on a thread; ranks wait for each other.

    results: after ``finish``, those of all chunks, in order. refused: how many were not stored, by
    reason; failed: how many of these because a tier failed.
    """

    def __init__(self, stack: DecoderStack, store: TieredKVStore) -> None:
        self._stack, self._store = stack, store
        self._thread = ThreadPoolExecutor(1, "kv-put", initializer=use_one_thread)
        self._puts: list[Future[PutResult]] = []
        self.results: list[PutResult] = []
        self.refused: Counter[Reason] = Counter()
        self.failed: Counter[Reason] = Counter()

    def put(self, key: KVKey, kv: ChunkKV) -> Steps[None]:
        """Queue a chunk; yields while too many wait."""
        self._puts.append(self._thread.submit(self._store.put_computed, key, kv))
        yield from self._until_waiting(MOST_WAITING - 1)

    def finish(self) -> Steps[int]:
        """Wait for all chunks; returns how many are stored. Raises the errors of ``put``."""
        yield from self._until_waiting(0)
        self.close()
        results = self.results = [put.result() for put in self._puts]
        self.refused.update(put.refusal for put in results if put.refusal)
        self.failed.update(put.refusal for put in results if put.refusal and put.failure)
        return len(results) - self.refused.total()

    def close(self, *, drop: bool = False) -> None:
        """Accept no more chunks; queued ones are still written, without waiting, unless dropped."""
        self._thread.shutdown(wait=False, cancel_futures=drop)

    def _until_waiting(self, most: int) -> Steps[None]:
        """Yield until every rank has at most so many unwritten chunks."""
        while True:
            waiting = [put for put in self._puts if not put.done()]
            if len(waiting) > most:
                waiting = list(wait(waiting, WAIT_SECONDS).not_done)
            if all(on_all_ranks(self._stack, [len(waiting) <= most])):
                return
            yield


def keep(
    stack: DecoderStack, store: TieredKVStore, blended: PromptPass, parts: Sequence[KVPart]
) -> Steps[KeepResult]:
    """Compute the KV of a prompt and its answer, and store those parts that the store lacks.

    Args:
        stack: of the model.
        store: where they are kept.
        blended: the pass over all tokens, in a buffer that keeps all layers.
        parts: of these tokens.
    """
    yield
    held = on_all_ranks(stack, store.contains_many(part.key for part in parts))
    missing = [part for part, is_held in zip(parts, held, strict=True) if not is_held]
    if not missing:
        return KeepResult(tuple(part.start for part in parts))
    fused, share = yield from _computed(stack, blended)
    writer = ChunkWriter(stack, store)
    try:
        for part in missing:
            yield from writer.put(part.key, part.copy(fused))
            yield
        yield from writer.finish()
    finally:
        # Who gives up waiting may evict the segments at once: none may be stored after that.
        writer.close(drop=True)
    pairs = zip(missing, writer.results, strict=True)
    refused = {part.start for part, put in pairs if not put}
    kept = tuple(part.start for part in parts if part.start not in refused)
    return KeepResult(kept, dict(writer.refused), share)


def _computed(stack: DecoderStack, blended: PromptPass) -> Steps[tuple[FusedKV, float]]:
    """Return all tokens' KV, and the work's share of full prefill's.

    What is too little to blend is computed in full.
    """
    if blended.placed:
        done = yield from blended.steps()
        if isinstance(done, FusedPrompt):
            return done.fused, done.compute_share
    tokens = blended.token_ids
    candidates = Candidates.none(tokens.numel())
    candidates.eligible = candidates.cached.clone()
    fused = FusedKV(stack.geometry, tokens.numel())
    run = BlendPass(stack, tokens, fused, candidates, REUSE_ONLY, needs_hidden=False)
    yield from run.steps()
    return fused, 1.0
