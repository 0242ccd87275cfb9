from __future__ import annotations

import time

import pytest
import torch

from cacheblend_rag.admin import inspect, select
from cacheblend_rag.admin.select import Choice
from cacheblend_rag.engines.labels import Label
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV, DiskTier, KVKey, StoredChunk, chunk_id, fingerprint
from cacheblend_rag.prefill.conversation_kv import turn_fingerprint
from cacheblend_rag.settings import LeadInConfig

ONE, TWO = fingerprint({"model": 1}), fingerprint({"model": 2})
KEYS = [KVKey(chunk_id([number]), of) for number, of in enumerate([ONE, ONE, TWO])]
AGES = [5000, 50, 3000]


@pytest.fixture
def folder(tmp_path):
    """A store of two chunks of one model and one of another."""
    tier = DiskTier(tmp_path)
    for key, age in zip(KEYS, AGES, strict=True):
        kv = ChunkKV(torch.rand(2, 1, 4, 8), torch.rand(2, 1, 4, 8), 1)
        assert tier.put(key, StoredChunk(kv, time.time() - age))
    return tmp_path


def test_what_fingerprints_are_of_is_told_as_far_as_it_is_known():
    labels = {ONE: Label("m", "float32", LeadInConfig())}
    turns = {one: turn_fingerprint(one) for one in (ONE, TWO)}
    prefix = fingerprint({"model": 1, "prefix_block": 64})
    assert inspect.kinds_of({ONE, TWO, prefix, *turns.values()}, labels) == {
        ONE: "m",
        turns[ONE]: "turns, m",
        turns[TWO]: "turns",
    }
    assert inspect.kinds_of({turns[ONE]}, labels)[turns[ONE]] == "turns, m"
    assert turns[ONE] not in inspect.kinds_of({ONE}, labels)


@pytest.mark.parametrize(
    ("condition", "chosen"),
    [
        (select.named([str(KEYS[1]), str(KEYS[2])]), {1, 2}),
        (Choice().condition(None), {0, 1, 2}),
        (Choice(fingerprint=ONE).condition(None), {0, 1}),
        (Choice(older_than=1000).condition(None), {0, 2}),
        (Choice(fingerprint=TWO, older_than=1000).condition(None), {2}),
        (Choice(fingerprint=TWO, older_than=4000).condition(None), set()),
    ],
)
def test_conditions_choose(folder, condition, chosen):
    with inspect.opened(folder) as found:
        matched = {key for key, entry in found.store.entries().items() if condition(key, entry)}
    assert matched == {KEYS[number] for number in chosen}


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda: select.named(["../../etc/passwd"]), "is not a KV key"),
        (lambda: Choice(fingerprint="nothing").condition(None), "is not a fingerprint"),
    ],
)
def test_what_is_no_name_is_refused(choose, message):
    with pytest.raises(StoreError, match=message):
        choose()
