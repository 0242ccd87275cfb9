import ast
import json
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import cacheblend_rag.kv
from cacheblend_rag.errors import (
    BadSignatureError,
    ConfigError,
    DamagedChunkError,
    ForeignChunkError,
)
from cacheblend_rag.kv import ChunkKV, KVKey, chunk_id, codec
from cacheblend_rag.kv.mac import CHECKSUM, VARIABLE, KeyedMac, mac_of
from cacheblend_rag.settings.base import Secret

from .samples import OTHER_FINGERPRINT, decode, encode, make_key, make_kv, same

KEY = make_key(1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def chunk_kvs(draw):
    """Any chunk KV: random bytes as tensors, so denormals and the largest numbers occur."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def tensor(shape, dtype):
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(shape).nan_to_num()

    prior = tensor((shape[2],), torch.float32) if draw(st.booleans()) else None
    position = draw(st.integers(0, 2**31))
    return ChunkKV.of(tensor(shape, dtype), tensor(shape, dtype), position, prior)


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(fields, body, *, padding=8):
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % padding)
    return struct.pack("<Q", len(text)) + text + body


def signed(fields, body):
    """An object whose checksums are right for whatever its header claims, as a forger would make.

    What a header says of its layers' checksums is left as it is.
    """
    metadata = fields["__metadata__"]
    tensors = sorted((name, field) for name, field in fields.items() if name != "__metadata__")
    essential = sorted((name, text) for name, text in metadata.items() if name != "head")
    digest = xxhash.xxh3_128(json.dumps([essential, tensors], separators=(",", ":")).encode())
    if "prior" in fields:
        digest.update(body[slice(*fields["prior"]["data_offsets"])])
    metadata["head"] = digest.hexdigest()
    return with_header(fields, body)


def layers_signed(body, layers=2, prior=16):
    """The checksums of a body's layers; prior: bytes before them."""
    size = (len(body) - prior) // layers
    parts = [body[prior + i * size : prior + (i + 1) * size] for i in range(layers)]
    return "".join(xxhash.xxh3_128_hexdigest(part) for part in parts)


@settings(deadline=None, max_examples=60)
@given(kv=chunk_kvs(), context=st.sampled_from(["", chunk_id([7])]))
def test_what_is_encoded_is_decoded(kv, context):
    key = KVKey(KEY.chunk_id, KEY.fingerprint, context)
    assert same(decode(encode(key, kv), key), kv)


def test_the_safetensors_library_reads_our_files(tmp_path):
    kv = make_kv(dtype=torch.bfloat16)
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(encode(KEY, kv))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert same(ChunkKV(tensors["kv"], 3, tensors["prior"]), kv)
    assert metadata["key"] == str(KEY)


def test_no_truncation_is_read():
    data = encode(KEY, make_kv())
    for length in range(len(data)):
        with pytest.raises(DamagedChunkError):
            decode(data[:length], KEY)


def test_no_flipped_bit_is_read():
    data = encode(KEY, make_kv(tokens=2))
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DamagedChunkError, ForeignChunkError)) as raised:
            decode(altered, KEY)
        assert "\n" not in str(raised.value)


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_damage(data):
    for junk in (data, struct.pack("<Q", len(data)) + data):
        with pytest.raises(DamagedChunkError):
            decode(junk, KEY)


def forge_fields(fields):
    """Yield (what is wrong, header fields, what is said): headers no writer of ours makes."""

    def changed(name, **change):
        return {**fields, name: {**fields[name], **change}}

    def told(**change):
        return changed("__metadata__", **change)

    digests = fields["__metadata__"]["layers"]
    wrong = r"shape of kv is not \(layers, 2, kv_heads, tokens, row size\)"
    differs = "header does not describe the tensors of its chunk"
    uncounted = "header has no checksum for each of 2 layers"
    ill = "layers is not that of a chunk KV"
    for shape in (
        [2, 2, 4, 8], [1, 4, 1, 4, 8], [0], [-2, 2, 1, 4, 8], [2, 2, 1, 4, 0],
        [2, 2, True, 4, 8], [2, 2, 1.0, 4, 8], [2, 2, "1", 4, 8], "kv", None,
    ):  # fmt: skip
        yield f"shape {shape}", changed("kv", shape=shape), wrong
    yield "no kv", {n: f for n, f in fields.items() if n != "kv"}, wrong
    yield "kv that is text", {**fields, "kv": "x"}, wrong
    absurd = changed("kv", shape=[2**62, 2, *[2**62] * 3])
    yield "absurd sizes", absurd, f"header has no checksum for each of {2**62} layers"
    fewer = changed("kv", shape=[1, 2, 2, 4, 8])
    yield "fewer layers", fewer, uncounted.replace("2 l", "1 l")
    yield "an integer dtype", changed("kv", dtype="I32"), differs
    yield "another dtype", changed("kv", dtype="F16"), differs
    yield "more tokens", changed("kv", shape=[2, 2, 1, 8, 4]), differs
    yield "prior of another dtype", changed("prior", dtype="F16", shape=[8]), differs
    yield "prior of another length", changed("prior", shape=[2, 2]), differs
    yield "prior that is text", {**fields, "prior": "x"}, differs
    yield "an overlap", changed("kv", data_offsets=[0, 512]), differs
    yield "offsets beyond the end", changed("kv", data_offsets=[2**40, 2**40 + 512]), differs
    yield "another tensor", {**fields, "extra": {**fields["prior"]}}, differs
    yield "scales of no codes", {**fields, "scales": {**fields["prior"]}}, differs
    yield "codes without scales", told(precision="fp8"), differs
    thin = {"shape": [2, 2, 2, 8, 4], "dtype": "U8", "data_offsets": [32, 288]}
    without = {**told(precision="int4"), "kv": thin}
    yield "rows of no codes", without, wrong
    yield "one checksum", told(layers=digests[:32]), uncounted
    yield "three checksums", told(layers=digests + digests[:32]), uncounted
    yield "a checksum of another kind", told(layers=digests[:-1] + "g"), ill
    yield "checksums in lines", told(layers=digests[:-1] + "\n"), ill
    yield "a checksum that is a number", told(layers=1), ill
    changed_over = digests[32:] + digests[:32]
    yield "checksums changed over", told(layers=changed_over), "checksum of layer 0 does not match"
    for name, text in (
        ("position", "-1"), ("position", "1\n"), ("key", "../../etc/passwd"), ("dtype", "I8"),
        ("precision", "fp3"), ("precision", None), ("mac", "none"), ("written", "now"),
    ):  # fmt: skip
        yield f"{name} {text!r}", told(**{name: text}), f"{name} is not that of a chunk KV"
    without = {n: v for n, v in fields["__metadata__"].items() if n != "precision"}
    nothing = "metadata is not that of a chunk KV"
    yield "no precision", {**fields, "__metadata__": without}, nothing
    yield "something else", told(author="me"), nothing


FORGERIES = {
    what: (forged, said)
    for what, forged, said in forge_fields(header_of(encode(KEY, make_kv()))[0])
}


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_headers_are_damage_even_with_right_checksums(what):
    _, body = header_of(encode(KEY, make_kv()))
    forged, said = FORGERIES[what]
    fields = json.loads(json.dumps(forged))
    try:
        data = signed(fields, body)
    except (TypeError, KeyError):
        data = with_header(fields, body)
    with pytest.raises(DamagedChunkError, match=f"^{said}$"):
        decode(data, KEY)


@pytest.mark.parametrize("at", [0, 16, -4], ids=["prior", "keys", "values"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_damage_even_with_right_checksums(at, number):
    fields, body = header_of(encode(KEY, make_kv()))
    altered = bytearray(body)
    at %= len(body)
    altered[at : at + 4] = struct.pack("<f", number)
    fields["__metadata__"]["layers"] = layers_signed(bytes(altered))
    with pytest.raises(DamagedChunkError, match=r"^holds NaN or infinity$"):
        decode(signed(fields, bytes(altered)), KEY)


class Ranges:
    """An object that is read by ranges, and what was read of it."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __call__(self, start, end):
        assert 0 <= start <= end <= len(self.data)
        self.asked.append((start, end))
        return torch.tensor(list(self.data[start:end]), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prior", [True, False])
def test_a_layer_is_one_range_of_bytes_that_is_checked_by_itself(dtype, prior):
    kv = make_kv(dtype=dtype, prior=prior)
    data = encode(KEY, kv)
    read = Ranges(data)
    head = codec.read_head(read, len(data), KEY)
    assert head.shape == kv.shape
    assert (head.position, head.dtype, head.nbytes) == (3, dtype, len(data))
    assert (head.prior is not None) == prior
    if prior:
        assert torch.equal(head.prior, kv.prior)
    for layer in reversed(range(2)):
        start, end = head.span(layer, layer + 1)
        assert same(head.checked(layer, layer + 1, read(start, end)), kv.layer(layer))
    assert head.span(0, 2) == (head.span(0, 1)[0], len(data))
    with pytest.raises(DamagedChunkError, match=r"^checksum of layer 0 does not match$"):
        head.checked(0, 1, read(*head.span(1, 2)))
    with pytest.raises(DamagedChunkError, match=r"^layer 0 was cut short$"):
        head.checked(0, 1, read(start, end - 1))
    with pytest.raises(DamagedChunkError, match=r"^layer 1 was cut short$"):
        head.checked(0, 2, read(start, end))


def test_a_head_that_claims_too_much_asks_for_nothing():
    data = encode(KEY, make_kv())
    read = Ranges(data)
    with pytest.raises(DamagedChunkError, match="more than"):
        codec.read_head(lambda start, end: read(start, min(end, len(data))), 2**37, KEY)
    assert read.asked == [(0, len(data))]


def test_more_layers_than_a_header_has_room_for_are_not_written():
    keys = torch.ones(2100, 1, 1, 1)
    with pytest.raises(ValueError, match="too many layers"):
        encode(KEY, ChunkKV.of(keys, keys, 0))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"1234567", "too short for a safetensors header"),
        (struct.pack("<Q", 2**16 + 8), "header claims 65544 bytes, more than 65536"),
        (struct.pack("<Q", 16) + b" " * 15, "truncated within its header"),
        (struct.pack("<Q", 9) + b"{} " * 3, "header is not padded to 8 bytes"),
        (struct.pack("<Q", 8) + b"no JSON ", "header is no JSON"),
        (struct.pack("<Q", 8) + b"[1, 2]  ", "header carries no metadata"),
        (struct.pack("<Q", 8) + b"{}      ", "header carries no metadata"),
    ],
)
def test_what_is_no_safetensors_header_is_named(data, said):
    with pytest.raises(DamagedChunkError, match=f"^{said}$"):
        decode(data, KEY)


def test_the_forger_of_these_tests_can_sign_an_honest_object():
    fields, body = header_of(encode(KEY, make_kv()))
    fields["__metadata__"]["head"] = ""
    assert same(decode(signed(fields, body), KEY), make_kv())


@pytest.mark.parametrize(
    "asked",
    [
        make_key(2),
        make_key(1, of=OTHER_FINGERPRINT),
        KVKey(KEY.chunk_id, KEY.fingerprint, chunk_id([7])),
    ],
    ids=["chunk", "fingerprint", "context"],
)
def test_another_keys_object_is_foreign(asked):
    with pytest.raises(ForeignChunkError, match=str(asked)):
        decode(encode(KEY, make_kv()), asked)


@pytest.mark.parametrize("version", ["cacheblend-rag/1", "cacheblend-rag/999"])
def test_another_format_version_is_foreign(version):
    fields, body = header_of(encode(KEY, make_kv()))
    fields["__metadata__"]["format"] = version
    with pytest.raises(ForeignChunkError, match=version):
        decode(signed(fields, body), KEY)


@pytest.mark.parametrize(
    "text",
    ["", "-", "../../../etc/passwd", str(KEY) + "-", str(KEY).upper(), str(KEY) + "\n", "a" * 49],
)
def test_only_keys_are_parsed_as_keys(text):
    with pytest.raises(ValueError, match=r"KV key|hex digits"):
        KVKey.parse(text)


def test_nothing_in_kv_imports_pickle_or_loads_what_pickle_wrote():
    folder = Path(cacheblend_rag.kv.__file__).parent
    sources = list(folder.rglob("*.py"))
    assert len(sources) >= 8
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                banned = ("pickle", "marshal", "shelve", "dill", "joblib", "transformers")
                assert not any(name.split(".")[0] in banned for name in names), source
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}


# Keys


OURS = KeyedMac(Secret("a key of sixteen characters"))
THEIRS = KeyedMac(Secret("another key of theirs"))


@pytest.mark.parametrize(
    ("written", "read", "said"),
    [
        (CHECKSUM, OURS, "was not written with the store's key"),
        (OURS, CHECKSUM, "was written with a key, and CACHEBLEND_MAC_KEY is not set"),
        (THEIRS, OURS, "was written with another key, or is damaged"),
    ],
)
def test_what_another_wrote_is_not_read(written, read, said):
    data = encode(KEY, make_kv(), written)
    with pytest.raises(BadSignatureError, match=said):
        decode(data, KEY, read)


def test_no_object_is_signed_by_saying_so():
    """Neither a header that claims the MAC, nor a layer of the forger's, is taken."""
    fields, body = header_of(encode(KEY, make_kv()))
    fields["__metadata__"]["mac"] = "blake2b"
    with pytest.raises(BadSignatureError):
        decode(with_header(fields, body), KEY, OURS)
    ours = bytearray(encode(KEY, make_kv(), OURS))
    ours[-1] ^= 1
    with pytest.raises(DamagedChunkError, match="layer 1"):
        decode(ours, KEY, OURS)


def test_a_key_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="CACHEBLEND_MAC_KEY must have at least 16 characters"):
        mac_of({VARIABLE: "short"})
    assert mac_of({}) is CHECKSUM
