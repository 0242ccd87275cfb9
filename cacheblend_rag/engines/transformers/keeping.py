"""Stores chunk KV as it is computed, and reports the outcome of each chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence

from cacheblend_rag.engines.shutdown import working
from cacheblend_rag.engines.tally import Stored
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import NO_ROOM
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.prefill.precompute import Computed, NoRoom
from cacheblend_rag.reason import Reason, ReasonCode

logger = logging.getLogger(__name__)

MODEL_CHANGED = Reason(ReasonCode.MODEL_CHANGED, "the model changed meanwhile")
"""The reason for chunks that were computed while adapters or weights were changed."""
NOT_COMPUTED = Reason(ReasonCode.NO_ROOM, NO_ROOM)
"""The reason for chunks that were not computed for lack of memory."""


def store_computed(
    store: TieredKVStore,
    plans: Sequence[ChunkPlan],
    steps: Computed,
    is_current: Callable[[KVKey], bool],
) -> Generator[Stored, None, None]:
    """Run the steps that compute chunks, and store each chunk; yields after each step.

    is_current: whether the model is still the one that a key is for.
    """
    yield Stored(skipped=sum(store.contains_many([plan.key for plan in plans])))
    for computed in steps:
        if computed is None:
            yield Stored()
            continue
        if isinstance(computed, NoRoom):
            logger.warning("%d chunks not computed: %s", len(computed.chunks), computed.lack)
            yield Stored.failure(NOT_COMPUTED, len(computed.chunks))
            continue
        plan, kv = computed
        with working():
            put = store.put_computed(plan.key, kv) if is_current(plan.key) else None
        if put is None:
            yield Stored(refused={MODEL_CHANGED: 1})
        else:
            yield Stored.after_put(put, kv.tokens)
