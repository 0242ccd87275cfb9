"""Counts deletions of chunks, so that no request gets blocks that were blended of their KV."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

from cacheblend_rag.engines.vllm.connector.stored_tokens import Name
from cacheblend_rag.engines.vllm.protocol import BlendJob
from cacheblend_rag.kv.chunk_kv import chunk_id

KEPT = 1 << 16
"""Deleted chunks that are remembered; once there were more, each deletion counts for all chunks."""


class Deletions:
    """How often each chunk was deleted, here or by another replica; for several threads.

    Prompts in which chunks were searched need none of it: they name what was stored at which time.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._dropped = 0
        self._lock = Lock()

    def note(self, names: Iterable[Name]) -> None:
        """Count the deletion of chunks."""
        with self._lock:
            for name in names:
                key = name.namespace, name.chunk_id
                self._counts[key] = self._counts.pop(key, 0) + 1
                if len(self._counts) > KEPT:
                    self._dropped += self._counts.popitem(last=False)[1]

    def mark(self, namespace: str, job: BlendJob, token_ids: Sequence[int]) -> str:
        """Return what a blend's blocks depend on beside its job: "" if nothing was deleted.

        Args:
            namespace: of its chunks, as a namespace_id.
            job: the blend.
            token_ids: the prompt.
        """
        if not self._counts:
            return ""
        keys = [
            (namespace, chunk_id(chunk.own_tokens(token_ids)))
            for chunk in job.chunks
            if not chunk.turn
        ]
        with self._lock:
            counts = [self._counts.get(key, 0) for key in keys]
            dropped = self._dropped
        return f" {dropped} {counts}" if dropped or any(counts) else ""
