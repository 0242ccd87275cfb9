"""LayerSource: layers read by ranges, ahead of their use, once for all, bounded, to be given up."""

import threading

import pytest
import torch

from cacheblend_rag.errors import DamagedChunkError, StoreError
from cacheblend_rag.kv import (
    ChunkKV,
    DiskTier,
    HostTier,
    StoredChunk,
    TieredKVStore,
    codec,
    opening,
    reading,
)

from .samples import (
    OTHER_FINGERPRINT,
    SlowBytes,
    chunk_files,
    make_key,
    make_kv,
    until,
)

LAYERS = 6
KEYS = [make_key(number) for number in range(6)]
TOKENS = 1100
"""So that an object is longer than what is read of it first."""


def long_kv(number=0, *, layers=LAYERS, tokens=TOKENS):
    draw = torch.Generator().manual_seed(number)
    kv = torch.randn(layers, 2, 1, tokens, 2, generator=draw)
    return ChunkKV(kv, 3, torch.rand(tokens, generator=draw))


KVS = {key: long_kv(number) for number, key in enumerate(KEYS)}
LAYER_BYTES = 2 * TOKENS * 2 * 4


@pytest.fixture
def slow():
    tier = SlowBytes()
    tier.fill(KVS)
    return tier


def heads(source):
    found = [source.take() for _ in range(len(source))]
    source.keep([each.chunk is not None for each in found])
    return found


def layers_of(source, layers=LAYERS):
    return [source.layer(layer) for layer in range(layers)]


def holds(read, keys=KEYS, kvs=KVS):
    """Whether layers, as they were handed out, are those of these chunks."""
    return all(
        torch.equal(there.numbers[0], kvs[key].numbers[layer])
        for layer, parts in enumerate(read)
        for key, there in zip(keys, parts, strict=True)
    )


def part(tier, first, key=KEYS[0]):
    """The range where a layer begins."""
    data = tier.objects[key]
    head = codec.read_head(lambda a, b: torch.tensor(list(data[a:b])).byte(), len(data), key)
    return key, head.span(first, first + 1)[0]


@pytest.mark.parametrize("least", [1, 3 * LAYER_BYTES, 4 * LAYER_BYTES, 1 << 30])
def test_layers_come_in_order_with_heads_before_them(slow, least):
    slow.least = least
    with TieredKVStore([slow]) as store, store.fetch(KEYS) as source:
        assert len(source) == len(KEYS)
        for key, found in zip(KEYS, heads(source), strict=True):
            assert (found.tier, found.reason) == ("bytes", None)
            assert found.head.shape == tuple(KVS[key].keys.shape)
            assert (found.head.position, found.head.dtype) == (3, torch.float32)
            assert torch.equal(found.head.prior, KVS[key].prior)
        assert len(source) == 0
        assert holds(layers_of(source))
    parts = {1: 6, 3 * LAYER_BYTES: 2, 4 * LAYER_BYTES: 2, 1 << 30: 1}[least]
    assert len(slow.ranges) == parts * len(KEYS)


def test_every_tier_hands_out_layers_and_says_why_not(tmp_path):
    host, disk = HostTier(None), DiskTier(tmp_path)
    disk.whole_bytes, disk.range_bytes, disk.grown_range_bytes = 0, 1, 0
    with TieredKVStore([host, disk]) as store:
        for key in KEYS[1:5]:
            disk.put(key, StoredChunk(KVS[key], 0.0))
        host.put(KEYS[0], StoredChunk(KVS[KEYS[0]], 0.0))
        disk.put(make_key(5, of=OTHER_FINGERPRINT), StoredChunk(make_kv(), 0.0))
        files = {
            str(key): path
            for key in KEYS
            for path in chunk_files(tmp_path)
            if str(key) in path.name
        }
        files[str(KEYS[3])].write_bytes(b"rubbish")
        asked = [*KEYS, make_key(99)]
        with store.fetch(asked) as source:
            found = heads(source)
            read = layers_of(source)
    assert [each.tier for each in found] == ["host", "disk", "disk", None, "disk", None, None]
    assert [each.reason for each in found] == [
        None, None, None, "damaged", None, "other model", "not stored",
    ]  # fmt: skip
    assert holds(read, [KEYS[0], KEYS[1], KEYS[2], KEYS[4]])


def test_those_who_read_a_chunk_at_once_read_it_once(slow, gate):
    slow.gate, keys = lambda *_: gate.wait(10), KEYS[:2]
    with TieredKVStore([slow]) as store, store.fetch(keys) as one, store.fetch(keys) as other:
        for source in (one, other):
            assert {found.tier for found in heads(source)} == {"bytes"}
        gate.set()
        for source in (one, other):
            assert holds(layers_of(source), keys)
    assert sorted(slow.opened, key=str) == sorted(keys, key=str)
    assert len(set(slow.ranges)) == len(slow.ranges)


def _from(kv, layer):
    return kv.part(layer, LAYERS)


def test_layers_are_read_ahead_as_far_as_there_is_room(monkeypatch, slow, gate):
    monkeypatch.setattr(reading, "ROOM_AHEAD_BYTES", 5 * LAYER_BYTES)
    with TieredKVStore([slow]) as store, store.fetch(KEYS[:2]) as source:
        heads(source)
        assert until(lambda: len(slow.ranges) == 5)
        assert source.wait(10)
        for layer in range(LAYERS):
            # What is handed out makes room for as much.
            assert holds(
                [[source.layer(layer)][0]], KEYS[:2], {k: _from(v, layer) for k, v in KVS.items()}
            )
            assert until(lambda layer=layer: len(slow.ranges) == min(12, 5 + 2 * (layer + 1)))
    assert store.reads.room.left == 5 * LAYER_BYTES


def test_a_layer_that_is_damaged_is_an_error_and_its_chunk_is_set_aside(slow):
    slow.objects[KEYS[1]][-5] ^= 1
    with TieredKVStore([HostTier(None), slow]) as store:
        with store.fetch(KEYS[:3]) as source:
            assert all(found.chunk for found in heads(source))
            read = layers_of(source)
            assert holds([(sound, also_sound) for sound, _, also_sound in read], KEYS[:3:2])
            # Layers are read ahead: once one is found damaged, those not read before are lost, too.
            damaged = [chunk for _, chunk, _ in read if isinstance(chunk, DamagedChunkError)]
            assert damaged
            assert damaged[-1] is read[-1][1]
            assert not slow.contains(KEYS[1])
            source.keep([True, False, True])
            source.rewind()
            assert holds(layers_of(source), [KEYS[0], KEYS[2]])
        assert store.stats()["bytes"]["quarantined"] == 1
        assert not store.contains(KEYS[1])


@pytest.mark.parametrize("what", ["gone", "another"])
def test_an_object_that_changes_while_it_is_read_is_an_error_and_stays(slow, gate, what):
    late = part(slow, 3)
    slow.gate = lambda *at: at != late or gate.wait(10)
    with TieredKVStore([slow]) as store, store.fetch(KEYS[:1]) as source:
        heads(source)
        assert holds(layers_of(source, 3), KEYS[:1])
        if what == "gone":
            del slow.objects[KEYS[0]]
        else:
            slow.fill({KEYS[0]: long_kv(7)})
            slow.written_at += 1
        gate.set()
        (error,) = source.layer(3)
        assert "removed or replaced" in str(error)
    assert isinstance(error, StoreError)
    assert not isinstance(error, DamagedChunkError)
    assert store.stats()["bytes"]["errors"] >= 1  # those read ahead may meet it, too
    assert store.stats()["bytes"]["quarantined"] == 0


def test_closing_drops_what_has_not_begun_and_gives_the_room_back(monkeypatch, slow, gate):
    monkeypatch.setattr(opening, "FETCH_THREADS", 2)
    slow.gate = lambda *_: gate.wait(10)
    with TieredKVStore([slow]) as store:
        given_up = store.fetch(KEYS[:1])
        heads(given_up)
        assert until(lambda: len(slow.ranges) == 2)
        given_up.close()
        assert given_up.wait(0)
        assert len(given_up) == 0
        gate.set()
        assert until(lambda: store.reads.room.left == reading.ROOM_AHEAD_BYTES)
        assert len(slow.ranges) == 2
        with store.fetch(KEYS[:1]) as source:
            heads(source)
            assert holds(layers_of(source), KEYS[:1])


def test_closing_the_store_ends_a_source(monkeypatch, slow, gate):
    monkeypatch.setattr(opening, "FETCH_THREADS", 1)
    slow.gate = lambda *_: gate.wait(10)
    store = TieredKVStore([slow])
    source = store.fetch(KEYS[:1])
    heads(source)
    threading.Timer(0.05, gate.set).start()
    store.close()
    assert any(isinstance(source.layer(layer)[0], StoreError) for layer in range(LAYERS))
    with store.fetch(KEYS[:1]) as late:
        assert late.take().reason == "store error"
