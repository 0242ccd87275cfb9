"""Orders a batch so that prompts which share chunks run next to each other.

Chunks that the first of them loaded into a fast tier are then still there for the others, even if
the batch has more chunks than fit into that tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cacheblend_rag.kv.chunk_kv import KVKey


def grouped(prompts: Sequence[Sequence[KVKey]]) -> list[int]:
    """Return the order of prompts, given as their chunks, that keeps shared chunks together.

    Prompts are sorted by their most shared chunk, then by the next one; others keep their order.
    """
    counts = Counter(key for keys in prompts for key in dict.fromkeys(keys))
    shared = [key for key, count in counts.most_common() if count > 1]
    ranks = {key: rank for rank, key in enumerate(shared)}

    def place(index: int) -> list[int]:
        return sorted(ranks[key] for key in set(prompts[index]) if key in ranks)

    return sorted(range(len(prompts)), key=place)
