"""Numbers rounded to a byte, against formats that are written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv import ChunkKV, TieredKVStore, codec
from cacheblend_rag.kv.precision import pack, unpack
from cacheblend_rag.settings import StoreConfig

from .samples import decode, encode, make_key, rounded, same, validate
from .test_codec import header_of, with_header

KEY = make_key(0)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def chunk(seed=0, *, dtype=torch.float32, shape=(3, 2, 20, 8), scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    channels = torch.rand(shape[-1], generator=draw).mul(4).exp()
    keys, values = torch.randn(2, *shape, generator=draw) * scale
    return ChunkKV((keys * channels).to(dtype), values.to(dtype), 3, torch.rand(shape[2]))


def raw_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def fp8_of(numbers):
    """The nearest e4m3 number by looking at all of them."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].double()
    return every[(numbers.double()[..., None] - every).abs().argmin(-1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_again_changes_nothing(dtype):
    for seed, scale in ((0, 1.0), (1, 1e-4), (2, 200.0)):
        once = rounded(chunk(seed, dtype=dtype, scale=scale), "fp8")
        assert once.precision == "fp8"
        again = rounded(ChunkKV(once.keys, once.values, 3), "fp8")
        assert torch.equal(again.keys, once.keys)
        assert torch.equal(again.values, once.values)
        for precision_of_store in ("fp8", "native"):
            assert same(rounded(once, precision_of_store), once)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.floats(-6e4, 6e4, width=16), min_size=16, max_size=16),
    st.sampled_from(DTYPES),
)
def test_any_numbers_may_be_rounded_twice(numbers, dtype):
    flat = torch.tensor(numbers).to(dtype)
    kv = ChunkKV(flat.view(1, 1, 4, 4), flat.flip(0).view(1, 1, 4, 4), 0)
    once = rounded(kv, "fp8")
    validate(once)
    again = rounded(ChunkKV(once.keys, once.values, 0), "fp8")
    assert torch.equal(again.keys, once.keys)
    assert torch.equal(again.values, once.values)


def test_fp8_takes_the_nearest_number_of_a_head():
    kv = chunk(scale=3.0)
    codes, exponents = pack(kv.keys[0], kv.values[0])
    assert codes.shape == (2, 2, 20, 8)
    assert exponents.shape == (4,)
    for part, own in zip(torch.cat((kv.keys[0], kv.values[0])), exponents, strict=True):
        scale = 2.0 ** int(own)
        assert 448 * scale / 2 < part.abs().max() <= 448 * scale
    keys, values = unpack(codes, exponents, torch.float32)
    for found, given_, own in zip(
        torch.cat((keys, values)), [*kv.keys[0], *kv.values[0]], exponents, strict=True
    ):
        scale = 2.0 ** int(own)
        wanted = fp8_of(given_ / scale) * scale
        assert torch.equal((found.double() - given_).abs(), (wanted - given_).abs())


def test_every_code_stands_for_its_number():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float()
    sound = numbers.isfinite()
    for dtype in DTYPES:
        shaped = codes[sound].view(2, 1, 127, 1)
        keys, values = unpack(shaped, torch.tensor([1, -2], dtype=torch.int8), dtype)
        first, second = numbers[sound].view(2, 1, 127, 1)
        assert torch.equal(keys, (2 * first).to(dtype))
        assert torch.equal(values, (second / 4).to(dtype))


def test_zeros_stay_zeros_and_the_largest_numbers_finite():
    for dtype in DTYPES:
        largest = torch.full((1, 1, 2, 4), torch.finfo(dtype).max, dtype=dtype)
        kv = rounded(ChunkKV(largest, torch.zeros_like(largest), 0), "fp8")
        validate(kv)
        assert bool((kv.keys > torch.finfo(dtype).max * 0.9).all())
        assert not kv.values.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounded_chunk_is_stored_in_bytes_and_read_as_it_is(dtype):
    kv = rounded(chunk(dtype=dtype), "fp8")
    plain = encode(KEY, chunk(dtype=dtype))
    data = encode(KEY, kv)
    itemsize = dtype.itemsize
    assert len(data) < len(plain) / itemsize * 1.35 + 2048
    read = decode(data, KEY)
    assert same(read, kv)
    assert read.precision == "fp8"
    head = codec.read_head(lambda start, end: raw_of(data)[start:end], len(data), KEY)
    for layer in range(3):
        raw = raw_of(data)[slice(*head.span(layer, layer + 1))]
        (found,) = head.checked(layer, layer + 1, raw)
        keys, values = found.unpacked()
        assert torch.equal(keys, kv.keys[layer])
        assert torch.equal(values, kv.values[layer])
    assert encode(KEY, read) == data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "native"}, "precision is 'native' of F8_E4M3"),
        ({"precision": "int8/F32"}, "precision is 'int8/F32' of F8_E4M3"),
        ({"precision": "fp8/I8"}, "precision is 'fp8/I8' of F8_E4M3"),
        ({"precision": "fp8"}, "precision is 'fp8' of F8_E4M3"),
    ],
)
def test_a_precision_that_contradicts_its_tensors_is_foreign(change, said):
    fields, body = header_of(encode(KEY, rounded(chunk(), "fp8")))
    fields["__metadata__"] |= change
    with pytest.raises(ForeignChunkError, match=said):
        decode(with_header(fields, body), KEY)


def test_scales_that_are_not_those_of_the_tensors_are_damage():
    fields, body = header_of(encode(KEY, rounded(chunk(), "fp8")))
    fields["scales"] = {**fields["scales"], "shape": [4, 3]}
    with pytest.raises(
        DamagedChunkError, match=r"scales are torch.int8 \(4, 3\), fp8 has \(3, 4\)"
    ):
        decode(with_header(fields, body), KEY)
    fields, body = header_of(encode(KEY, chunk()))
    fields["scales"] = {"dtype": "I8", "shape": [len(body)], "data_offsets": [0, len(body)]}
    with pytest.raises(DamagedChunkError):
        decode(with_header(fields, body), KEY)


def test_what_is_put_is_rounded_once_for_all_tiers(tmp_path):
    config = StoreConfig(kv_path=tmp_path, host_bytes=1 << 20, precision="fp8")
    with TieredKVStore.of(config) as store:
        kv = chunk()
        assert store.put(KEY, kv)
        from_host = store.get(KEY).kv
        assert same(from_host, rounded(kv, "fp8"))
        assert not torch.equal(from_host.keys, kv.keys)
        store.forget([KEY])
        from_disk = store.get(KEY)
        assert from_disk.tier == "disk"
        assert same(from_disk.kv, from_host)
        assert store.get(KEY).tier == "host"
        (file,) = tmp_path.glob("?/?/*.safetensors")
        assert file.stat().st_size < kv.nbytes / 2
