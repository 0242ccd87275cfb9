"""Affinities: what requests that share chunks have in common."""

from __future__ import annotations

import random
import re
from collections import Counter

from cacheblend_rag.engines.vllm.affinity import affinity_of
from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, fingerprint

KEYS = [KVKey(chunk_id((i, 1)), fingerprint({"model": "a"})) for i in range(400)]


def test_it_depends_on_the_set_of_chunks_alone() -> None:
    assert affinity_of(KEYS[:4]) == affinity_of([*reversed(KEYS[:4]), KEYS[2]])
    assert re.fullmatch(r"[0-9a-f]{16}", affinity_of(KEYS[:4]))
    assert affinity_of([]) == ""


def test_other_models_and_namespaces_have_other_values_of_a_text() -> None:
    (name,) = {key.chunk_id for key in KEYS[:1]}
    prints = [fingerprint({"model": m}, n) for m in "ab" for n in ("default", "tenant")]
    assert len({affinity_of([KVKey(name, one)]) for one in prints}) == 4
    assert not any(part in affinity_of(KEYS[:1]) for part in (name[:8], name[-8:]))


def test_prompts_agree_as_often_as_they_share_chunks() -> None:
    draw, agree = random.Random(4), Counter[int]()
    trials = 400
    for _ in range(trials):
        eight = draw.sample(KEYS, 8)
        for shared in (0, 4, 6):
            one, other = eight[: shared + (8 - shared) // 2], eight[:shared]
            other += eight[shared + (8 - shared) // 2 :]
            agree[shared] += affinity_of(one) == affinity_of(other)
    assert agree[0] == 0
    assert 0.4 < agree[4] / trials < 0.6  # 4 of 8 chunks
    assert 0.65 < agree[6] / trials < 0.85  # 6 of 8


def test_values_are_spread_evenly() -> None:
    """Smallest hashes begin with zeros; their other halves do not."""
    draw = random.Random(5)
    first = Counter(affinity_of(draw.sample(KEYS, 2))[0] for _ in range(3000))
    assert len(first) == 16
    assert max(first.values()) < 3000 / 16 * 2
