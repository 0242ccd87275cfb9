"""Packed chunks: rounded once, stored and kept as codes, read as numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend_rag.errors import BadSignatureError, DamagedChunkError
from cacheblend_rag.kv import ChunkKV, DiskTier, HostTier, TieredKVStore, codec
from cacheblend_rag.kv.codec import NOT_FINITE
from cacheblend_rag.kv.mac import KeyedMac
from cacheblend_rag.kv.precision import FORMATS
from cacheblend_rag.kv.reader import WholeReader
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.settings.base import Secret

from .samples import decode, encode, make_key, rounded, same, validate

KEY = make_key(0)

FP8, INT4 = FORMATS["fp8"], FORMATS["int4"]
of_each = pytest.mark.parametrize("precision", FORMATS)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS, KV_HEADS, TOKENS, HEAD_DIM = 6, 2, 64, 16


def chunk(seed=0, *, dtype=torch.float32, shape=(LAYERS, KV_HEADS, TOKENS, HEAD_DIM), scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    channels = torch.rand(shape[-1], generator=draw).mul(4).exp()
    keys, values = torch.randn(2, *shape, generator=draw) * scale
    prior = torch.rand(shape[2], generator=draw)
    return ChunkKV.of((keys * channels).to(dtype), values.to(dtype), 3, prior)


def fp8_of(numbers):
    """The nearest e4m3 number by looking at all of them."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].double()
    return every[(numbers.double()[..., None] - every).abs().argmin(-1)]


@st.composite
def small_chunks(draw):
    numbers = draw(st.lists(st.floats(-6e4, 6e4, width=16), min_size=16, max_size=16))
    flat = torch.tensor(numbers).to(draw(st.sampled_from(DTYPES)))
    return ChunkKV.of(flat.view(1, 1, 4, 4), flat.flip(0).view(1, 1, 4, 4), 0)


@settings(deadline=None, max_examples=80)
@given(small_chunks())
def test_any_numbers_may_be_rounded_twice(kv):
    once = rounded(kv, "fp8")
    validate(once)
    again = rounded(ChunkKV.of(once.keys, once.values, 0), "fp8")
    assert torch.equal(again.keys, once.keys)
    assert torch.equal(again.values, once.values)


def test_fp8_takes_the_nearest_number_of_a_head():
    kv = chunk(scale=3.0)
    codes, exponents = FP8.pack(kv.numbers[0])
    assert codes.shape == (2, KV_HEADS, TOKENS, HEAD_DIM)
    assert exponents.shape == (4,)
    for part, own in zip(kv.numbers[0].flatten(0, 1), exponents, strict=True):
        scale = 2.0 ** int(own)
        assert 448 * scale / 2 < part.abs().max() <= 448 * scale
    read = FP8.unpack(codes, exponents, torch.float32)
    for found, given_, own in zip(
        read.flatten(0, 1), kv.numbers[0].flatten(0, 1), exponents, strict=True
    ):
        scale = 2.0 ** int(own)
        wanted = fp8_of(given_ / scale) * scale
        assert torch.equal((found.double() - given_).abs(), (wanted - given_).abs())


@settings(deadline=None, max_examples=80)
@given(small_chunks())
def test_int4_is_within_half_a_step_of_a_row(kv):
    once = rounded(kv, "int4")
    validate(once)
    middle, deviation = once.scales.view(2, 2, 4).double().unbind(1)
    step = once.numbers[0, :, 0, :, -2:].contiguous().view(torch.bfloat16).double()
    off = once.unpacked().numbers[0, :, 0].double() - kv.numbers[0, :, 0].double()
    # what bfloat16 rounds off the least number and the step, and the dtype off the result, beside
    bound = step * deviation[:, None] * (0.5 + 15 / 128) + 2**-8 * kv.numbers.double().abs().amax()
    assert (off.abs() <= bound).all()
    assert (middle.abs() <= 6.1e4).all()


def test_a_bias_of_one_channel_costs_the_others_nothing():
    """As a key's is at position 0."""
    errors = []
    for bias in (0, 200):
        kv = chunk()
        kv.numbers[..., 3] += bias
        off = (rounded(kv, "int4").unpacked().numbers - kv.numbers).square().mean((0, 1, 2, 3))
        errors.append(off.sqrt())
    assert (errors[1] < 1.2 * errors[0]).all()


def test_one_large_token_costs_the_others_little():
    """As an attention sink is."""
    errors = []
    for times in (1, 1000):
        kv = chunk(shape=(LAYERS, KV_HEADS, 32, HEAD_DIM))
        kv.numbers[..., 0, :] *= times
        off = rounded(kv, "int4").unpacked().numbers - kv.numbers
        errors.append(off[..., 1:, :].square().mean((0, 2, 3, 4)).sqrt())
    assert (errors[1] < 1.1 * errors[0]).all()


def test_int4_rounds_keys_by_a_twentieth_and_values_by_a_fifth():
    kv = chunk(shape=(LAYERS, KV_HEADS, 150, 128))
    off = rounded(kv, "int4").unpacked().numbers - kv.numbers
    by_channel = off.square().mean((0, 2, 3)) / kv.numbers.square().mean((0, 2, 3))
    keys, values = by_channel.mean(-1).sqrt()
    assert keys < 0.055
    assert values < 0.22


@of_each
def test_what_is_put_is_rounded_once_for_all_tiers(tmp_path, precision):
    config = StoreConfig(kv_path=tmp_path, host_bytes=1 << 20, precision=precision)
    with TieredKVStore.of(config) as store:
        kv = chunk()
        assert store.put(KEY, kv)
        from_host = store.get(KEY).kv
        assert same(from_host, rounded(kv, precision))
        assert not torch.equal(from_host.keys, kv.keys)
        store.forget([KEY])
        from_disk = store.get(KEY)
        assert from_disk.tier == "disk"
        assert same(from_disk.kv, from_host)
        assert store.get(KEY).tier == "host"
        (file,) = tmp_path.glob("??/*.safetensors")
        assert file.stat().st_size < kv.nbytes / (2 if precision == "fp8" else 3)


# Read by layers


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    """Reads of a layer or two, so that these chunks are read by their layers."""
    monkeypatch.setattr(DiskTier, "whole_bytes", 1 << 10)
    monkeypatch.setattr(DiskTier, "range_bytes", 1 << 12)
    monkeypatch.setattr(DiskTier, "grown_range_bytes", 0)
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 12)


def layers_of(source):
    with source:
        heads = [source.take() for _ in range(len(source))]
        assert all(one.head is not None for one in heads)
        return [source.layer(layer)[0] for layer in range(LAYERS)]


@of_each
def test_layers_are_handed_out_as_numbers_or_as_they_are_stored(tmp_path, precision):
    kv = chunk().packed(precision)
    for tiers in ([HostTier(None)], [DiskTier(tmp_path)], [HostTier(None), DiskTier(tmp_path)]):
        with TieredKVStore(tiers, precision=precision) as store:
            store.put(KEY, chunk())
            for unpack_them, wanted in ((True, kv.unpacked()), (False, kv)):
                found = ChunkKV.joined(layers_of(store.fetch([KEY], unpack=unpack_them)))
                assert same(found, wanted)


OUT_OF = "out of the range"
FORGED = {
    "fp8": {126: NOT_FINITE, 127: OUT_OF, -121: OUT_OF},
    "int4": {torch.nan: OUT_OF, -torch.inf: OUT_OF, 1e30: OUT_OF},
}


@of_each
def test_codes_that_are_no_numbers_are_damage_though_their_checksums_hold(precision):
    sound = chunk().packed(precision)
    codes = sound.numbers.clone()
    codes.view(torch.uint8)[3, 1, 1, 7, -1] = 0xFF  # of fp8 NaN, of int4 a step of -3e38
    bad = [(replace(sound, numbers=codes), NOT_FINITE)]
    for scale, said in FORGED[precision].items():
        scales = sound.scales.clone()
        scales[4].fill_(scale)
        bad.append((replace(sound, scales=scales), said))
    for kv, said in bad:
        data = b"".join(codec.ChunkObject(KEY, kv).parts())
        with pytest.raises(DamagedChunkError, match=said):
            decode(data, KEY)
    assert same(decode(encode(KEY, sound), KEY), sound)


def test_numbers_that_a_key_vouches_for_are_not_checked_again():
    mac, bad = KeyedMac(Secret("a key of sixteen or more")), chunk()
    bad.values[0, 0, 0, 0] = torch.nan
    data = b"".join(codec.ChunkObject(KEY, bad, mac).parts())
    assert same(decode(data, KEY, mac), bad)
    with pytest.raises(BadSignatureError):
        decode(data, KEY, KeyedMac(Secret("another key of sixteen")))


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
            numbers = FP8.unpack(codes, exponents, torch.float64)
            largest = float(torch.finfo(dtype).max)
            fits = not codes.float().isnan().any() and bool((numbers.abs() <= largest).all())
            assert FP8.are_finite(codes, exponents, dtype) == fits
            verdicts.add(fits)
    assert verdicts == {True, False}
    assert FP8.are_written(torch.tensor([-120, 126], dtype=torch.int8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_is_in_range_decodes_to_finite_numbers_of_4_bits(dtype):
    draw = torch.Generator().manual_seed(3)

    def any_of(*shape):
        exponents = torch.randint(-60, 61, shape, generator=draw)
        exponents.view(-1)[:2] = torch.tensor([60, -60])
        return exponents.double().exp2().mul(1 - 2 * (exponents % 2)).bfloat16()

    for _ in range(20):
        bits = torch.randint(0, 256, (2, 2, 2, 3, 8), generator=draw, dtype=torch.uint8)
        scales = any_of(2, 4, 2, 16)
        codes = torch.cat((bits, any_of(2, 2, 2, 3, 2).view(torch.uint8)), -1)
        assert INT4.are_written(scales)
        assert INT4.are_finite(codes, scales, dtype)
        assert INT4.unpack(codes, scales, dtype).isfinite().all()


class OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.is_view, f"{function} computes"
        return function(*args, **(kwargs or {}))


@of_each
def test_nothing_is_computed_on_the_way_to_a_device(precision):
    """Its copy_stream does not wait for what other streams compute then."""
    kv = chunk().packed(precision)
    with OnlyViews():
        layer = WholeReader(kv, 0.0).read(1, 3).layer(1).cut(3, 40)
        assert len(layer.tensors) == 2
        assert layer.cut(5, 9).tokens == 4
