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


def test_counts_are_those_of_the_files(folder):
    sizes = {path.stem: path.stat().st_size for path in folder.glob("?/?/*.safetensors")}
    with inspect.opened(folder) as found:
        count = found.count()
    assert (count.total.entries, count.total.nbytes) == (3, sum(sizes.values()))
    assert count.fingerprints[ONE].nbytes == sizes[str(KEYS[0])] + sizes[str(KEYS[1])]
    assert count.fingerprints[TWO] == inspect.Holding(1, sizes[str(KEYS[2])])
    assert count.quarantined == 0


def test_chunks_are_listed_least_recently_used_first(folder):
    with inspect.opened(folder) as found:
        uses = [entry.used_at for _, entry in found.by_use()]
        assert uses == sorted(entry.used_at for entry in found.store.entries().values())


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


def test_a_store_is_read_through_and_damage_is_left_in_place(folder):
    assert inspect.examine_store(folder)["damaged"] == []
    (path,) = folder.glob(f"?/?/{KEYS[1]}.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = inspect.examine_store(folder)
    assert (found["entries"], found["problem"]) == (3, None)
    assert [of["key"] for of in found["damaged"]] == [str(KEYS[1])]
    assert path.exists()


def test_what_is_no_store_is_refused_and_left_as_it_is(tmp_path):
    for examine in (inspect.examine_store, inspect.check_is_store):
        with pytest.raises(StoreError, match="is not a store"):
            examine(tmp_path)
        with pytest.raises(StoreError, match="is not a folder"):
            examine(tmp_path / "nothing")
    assert not any(tmp_path.iterdir())
