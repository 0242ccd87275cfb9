"""The affinity of a request: a digest of its chunks, by which a proxy chooses a replica.

Two requests have the same affinity with a probability of what their chunks have in common, as a
share of all chunks of both (min-hash). So a proxy that hashes the header sends requests that share
most of their chunks to the same replica, which has their KV in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cacheblend_rag.kv.chunk_kv import KVKey

AFFINITY_HEADER = "X-CacheBlend-Affinity"
DIGEST_BYTES = 16
PERSON = b"affinity"


def affinity_of(keys: Iterable[KVKey]) -> str:
    """Return a min-hash of a set of chunk keys: 16 hex digits, "" for no chunk.

    Each key is hashed; of the smallest hash, the half that the comparison does not depend on is
    returned, so that values are spread evenly. It does not depend on order or repetition, and is
    the same in all processes. Keys contain hashes of texts, model and namespace: the value reveals
    no text, but who has the text of a chunk, and all settings, can recognize its value.
    """
    digests = (
        hashlib.blake2b(str(key).encode(), digest_size=DIGEST_BYTES, person=PERSON).digest()
        for key in keys
    )
    smallest = min(digests, default=b"")
    return smallest[DIGEST_BYTES // 2 :].hex()
