"""Chunks of a byte a number stay packed wherever they are kept, until somebody needs numbers."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv import (
    ChunkKV,
    DiskTier,
    HostTier,
    TieredKVStore,
    codec,
)
from cacheblend_rag.kv.packed_kv import PackedKV, PackedLayer, packed
from cacheblend_rag.kv.precision import are_finite, are_written, pack, unpack
from cacheblend_rag.kv.reader import WholeReader
from cacheblend_rag.kv.tiers import disk as disk_module

from .samples import decode, make_key, rounded, same, until

KEY, OTHER = make_key(0), make_key(1)
LAYERS, KV_HEADS, TOKENS, HEAD_DIM = 6, 2, 64, 16


def chunk(seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, LAYERS, KV_HEADS, TOKENS, HEAD_DIM, generator=draw).to(dtype)
    return ChunkKV(keys, values, 5, torch.rand(TOKENS, generator=draw))


@pytest.fixture
def unpackings(monkeypatch):
    """The threads on which layers were unpacked, in order."""
    found, own = [], PackedLayer.unpacked

    def unpacked(layer):
        found.append(threading.current_thread().name)
        return own(layer)

    monkeypatch.setattr(PackedLayer, "unpacked", unpacked)
    return found


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    """Reads of a layer or two, so that these chunks are read by their layers."""
    monkeypatch.setattr(disk_module.DiskTier, "whole_bytes", 1 << 10)
    monkeypatch.setattr(disk_module.DiskTier, "range_bytes", 1 << 12)
    monkeypatch.setattr(disk_module.DiskTier, "grown_range_bytes", 0)
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 12)


def layers_of(source):
    with source:
        heads = [source.take() for _ in range(len(source))]
        assert all(one.head is not None for one in heads)
        return [source.layer(layer)[0] for layer in range(LAYERS)]


def test_layers_are_handed_out_as_numbers_or_as_they_are_stored(tmp_path):
    kv = rounded(chunk(), "fp8")
    codes, exponents = pack(kv.keys[0], kv.values[0])
    for tiers in ([HostTier(None)], [DiskTier(tmp_path)], [HostTier(None), DiskTier(tmp_path)]):
        with TieredKVStore(tiers, precision="fp8") as store:
            store.put(KEY, chunk())
            for layer, (keys, values) in enumerate(layers_of(store.fetch([KEY]))):
                assert torch.equal(keys, kv.keys[layer])
                assert torch.equal(values, kv.values[layer])
            plain = layers_of(store.fetch([KEY], unpack=False))
            assert torch.equal(plain[0].codes.view(torch.int8), codes.view(torch.int8))
            assert torch.equal(plain[0].exponents, exponents)
            for layer, one in enumerate(plain):
                assert torch.equal(one.unpacked()[0], kv.keys[layer])
                assert torch.equal(one.unpacked()[1], kv.values[layer])


@pytest.mark.parametrize("unpack", [True, False])
def test_what_is_read_by_layers_is_kept_packed(unpack, tmp_path, unpackings):
    host = HostTier(None)
    with TieredKVStore([DiskTier(tmp_path)], precision="fp8") as store:
        store.put(KEY, chunk())
    with TieredKVStore([host, DiskTier(tmp_path)], precision="fp8") as store:
        layers_of(store.fetch([KEY], unpack=unpack))
        assert until(lambda: host.contains(KEY))
        assert len(unpackings) == (LAYERS if unpack else 0)
        kept = host.get(KEY).kv
        assert isinstance(kept, PackedKV)
        assert kept.nbytes < chunk().nbytes / 3
        assert same(store.get(KEY).kv, rounded(chunk(), "fp8"))
        assert store.get(KEY).tier == "host"


def test_what_was_rounded_elsewhere_is_packed_by_a_store_that_rounds_nothing():
    """As when chunks are imported."""
    host = HostTier(None)
    with TieredKVStore([host]) as store:
        store.put(KEY, rounded(chunk(), "fp8"))
        assert isinstance(host.get(KEY).kv, PackedKV)
        assert same(store.get(KEY).kv, rounded(chunk(), "fp8"))
        assert store.get(KEY).kv.precision == "fp8"


def test_codes_that_are_no_numbers_are_damage_though_their_checksums_hold():
    sound = packed(chunk(), "fp8")
    codes = sound.codes.clone()
    codes.view(torch.uint8)[3, 1, 1, 7, 2] = 0xFF
    for bad, said in (
        (replace(sound, codes=codes), "NaN or infinity"),
        (replace(sound, exponents=torch.full_like(sound.exponents, 126)), "NaN or infinity"),
        (
            replace(sound, exponents=torch.full_like(sound.exponents, 127)),
            "scales are out of the range",
        ),
        (
            replace(sound, exponents=torch.full_like(sound.exponents, -121)),
            "scales are out of the range",
        ),
    ):
        data = b"".join(codec.ChunkObject(KEY, bad).parts())
        with pytest.raises(DamagedChunkError, match=said):
            decode(data, KEY)
    decode(b"".join(codec.ChunkObject(KEY, sound).parts()), KEY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_are_finite_if_and_only_if_their_numbers_are(dtype):
    draw = torch.Generator().manual_seed(3)
    verdicts = set()
    for exponent in [-120, 0, 5, 6, 7, 8, 9, 10, 118, 119, 120, 121, 126]:
        for most in (1, 64, 126, 128):
            raw = torch.randint(0, most, (2, 2, 3, 4), generator=draw, dtype=torch.uint8)
            raw |= torch.randint(0, 2, raw.shape, generator=draw, dtype=torch.uint8) << 7
            codes = raw.view(torch.float8_e4m3fn)
            if most == 128:
                raw[1, 1, 2, 3] = 0x7F
            exponents = torch.full((4,), -120, dtype=torch.int8)
            exponents[int(torch.randint(0, 4, (), generator=draw))] = exponent
            numbers = torch.stack(unpack(codes, exponents, torch.float64))
            largest = float(torch.finfo(dtype).max)
            fits = not codes.float().isnan().any() and bool((numbers.abs() <= largest).all())
            assert are_finite(codes, exponents, dtype) == fits
            verdicts.add(fits)
    assert verdicts == {True, False}
    assert are_written(torch.tensor([-120, 126], dtype=torch.int8))
    assert not are_written(torch.tensor([0, 127], dtype=torch.int8))
    assert not are_written(torch.tensor([-121, 0], dtype=torch.int8))


def test_a_layer_may_be_cut_anywhere():
    kv = packed(chunk(), "fp8")
    assert kv.nbytes == kv.codes.numel() + kv.exponents.numel() + 4 * TOKENS
    layer = kv.layer(2)
    keys, values = layer.unpacked()
    for start, end in ((0, 1), (3, 40), (63, 64), (0, 64)):
        part = layer.cut(start, end)
        assert part.tokens == end - start
        found = part.moved([tensor.clone() for tensor in part.tensors]).unpacked()
        assert torch.equal(found[0], keys[:, start:end])
        assert torch.equal(found[1], values[:, start:end])
        assert sum(tensor.nbytes for tensor in part.tensors) <= part.row_bytes * part.tokens


class OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.is_view, f"{function} computes"
        return function(*args, **(kwargs or {}))


def test_nothing_is_computed_on_the_way_to_a_device():
    """Its copy_stream does not wait for what other streams compute then."""
    kv = packed(chunk(), "fp8")
    with OnlyViews():
        layer = WholeReader(kv, 0.0).read(1, 3)[1].cut(3, 40)
        assert len(layer.tensors) == 2
        assert layer.cut(5, 9).tokens == 4
