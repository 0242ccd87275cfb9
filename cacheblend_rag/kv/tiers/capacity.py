"""Keeps one tier within its capacity: which chunks fit, and which are evicted for a new one."""

from __future__ import annotations

from collections.abc import Iterable

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.admission import Admission, RefusedError, Resident
from cacheblend_rag.kv.tiers.counters import Counters
from cacheblend_rag.kv.tiers.policy import TierPolicy


class Capacity:
    """The capacity of one tier, which may be without limit.

    The tier knows its chunks and evicts them; this class says which, and counts them. In its
    methods, ``by_last_use`` are the chunks that are not pinned and not the new one, the least
    recently used first; ``excess`` are the bytes that are too many with the new one; ``held`` is
    the number of chunks in the tier.
    """

    def __init__(self, policy: TierPolicy, counts: Counters) -> None:
        self._bytes, self._watermark = policy.capacity_bytes, policy.watermark
        self._admission, self._counts = Admission(policy), counts

    def see(self, keys: Iterable[KVKey]) -> None:
        """See ``Tier.see``."""
        self._admission.see(keys)

    def excess(self, nbytes: int) -> int:
        """Return how many of so many bytes are too many; 0 or less if they fit."""
        return 0 if self._bytes is None else nbytes - self._bytes

    def check_fits(self, nbytes: int) -> None:
        """Raise RefusedError for a chunk that is larger than the capacity."""
        if self.excess(nbytes) > 0:
            raise RefusedError(f"{nbytes} bytes, capacity is {self._bytes}")

    def would_reject(self, key: KVKey) -> bool:
        """Whether a chunk seen as often was just rejected, so that the search can be skipped."""
        return self._admission.would_reject(key)

    def would_take(
        self, key: KVKey, by_last_use: Iterable[Resident], *, excess: int, held: int
    ) -> bool:
        """Whether ``evicted_for`` would let a chunk in; nothing is counted."""
        try:
            self._admission.victims(key, by_last_use, excess=excess, spare=0, held=held)
        except RefusedError:
            return False
        return True

    def evicted_for(
        self, key: KVKey, by_last_use: Iterable[Resident], *, excess: int, held: int, spare: int = 0
    ) -> list[KVKey]:
        """Return and count the chunks to evict so that a chunk fits.

        spare: least number of further bytes to evict. Raises RefusedError before anything is
        evicted in vain.
        """
        if excess <= 0:
            return []
        spare = max(spare, int((self._bytes or 0) * (1 - self._watermark)))
        gone = self._admission.victims(key, by_last_use, excess=excess, spare=spare, held=held)
        self._counts.add("admitted")
        self._counts.add("evictions", len(gone))
        return [one.key for one in gone]

    def freed(self, counter: str, chunks: int) -> None:
        """Count chunks that were removed although none was to be stored, so that there is room."""
        self._counts.add(counter, chunks)
        self._admission.forget_rejections()
