"""Orders a batch so that prompts which share chunks run next to each other.

What the first of them brought into a fast tier is still there for the others, also where the batch
holds more chunks than that tier has room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cacheblend_rag.kv.chunk_kv import KVKey


def grouped(prompts: Sequence[Sequence[KVKey]]) -> list[int]:
    """Return the indexes of prompts, given as their chunks, so that those who share some are near.

    Prompts stand under their most shared chunk, then under the next one; others keep their order.
    """
    counts = Counter(key for keys in prompts for key in dict.fromkeys(keys))
    shared = [key for key, count in counts.most_common() if count > 1]
    ranks = {key: rank for rank, key in enumerate(shared)}

    def place(index: int) -> list[int]:
        return sorted(ranks[key] for key in set(prompts[index]) if key in ranks)

    return sorted(range(len(prompts)), key=place)
