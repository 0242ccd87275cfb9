import ast
import json
import os
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

import cacheblend_rag.kv
from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv import ChunkKV, KVKey, chunk_id, codec

from .samples import OTHER_FINGERPRINT, make_key, make_kv, same

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
    return ChunkKV(tensor(shape, dtype), tensor(shape, dtype), position, prior)


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(fields, body, *, padding=8):
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % padding)
    return struct.pack("<Q", len(text)) + text + body


def sealed(fields, body):
    """An object whose checksum is right for whatever its header claims, as a forger would make."""
    metadata = fields["__metadata__"]
    essential = {n: v for n, v in sorted(metadata.items()) if n != "checksum"}
    tensors = {n: f for n, f in sorted(fields.items()) if n != "__metadata__"}
    shapes = [[n, f["dtype"], *f["shape"]] for n, f in tensors.items()]
    digest = xxhash.xxh3_128(json.dumps([essential, shapes]).encode())
    for field in tensors.values():
        digest.update(body[slice(*field["data_offsets"])])
    metadata["checksum"] = digest.hexdigest()
    return with_header(fields, body)


@settings(deadline=None, max_examples=60)
@given(kv=chunk_kvs(), context=st.sampled_from(["", chunk_id([7])]))
def test_what_is_encoded_is_decoded(kv, context):
    key = KVKey(KEY.chunk_id, KEY.fingerprint, context)
    assert same(codec.decode(codec.encode(key, kv), key), kv)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_read_as_bytes_are(tmp_path, dtype):
    kv = make_kv(dtype=dtype)
    path = tmp_path / "chunk"
    path.write_bytes(codec.encode(KEY, kv))
    assert same(codec.read(str(path), KEY), kv)


def test_tensors_read_from_a_file_outlive_it_and_never_reach_it(tmp_path):
    kv = make_kv()
    path = tmp_path / "chunk"
    path.write_bytes(codec.encode(KEY, kv))
    read = codec.read(str(path), KEY)
    read.keys.zero_()
    assert same(codec.read(str(path), KEY), kv)
    path.unlink()
    assert torch.equal(read.values, kv.values)


def test_views_that_are_not_contiguous_are_stored_by_value():
    kv = make_kv()
    wide = ChunkKV(
        torch.cat([kv.keys, kv.keys], 3)[..., :8],
        kv.values.transpose(2, 3).contiguous().transpose(2, 3),
        kv.position,
        kv.prior,
    )
    assert not wide.keys.is_contiguous()
    assert same(codec.decode(codec.encode(KEY, wide), KEY), kv)


def test_the_safetensors_library_reads_our_files(tmp_path):
    kv = make_kv(dtype=torch.bfloat16)
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(codec.encode(KEY, kv))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert same(ChunkKV(tensors["keys"], tensors["values"], 3, tensors["prior"]), kv)
    assert metadata["key"] == str(KEY)
    assert metadata["tokens"] == "4"


def test_objects_laid_out_by_the_safetensors_library_are_read():
    kv = make_kv(dtype=torch.float16)
    fields, _ = header_of(codec.encode(KEY, kv))
    tensors = {"keys": kv.keys, "values": kv.values, "prior": kv.prior}
    theirs = save(tensors, metadata=fields["__metadata__"])
    assert header_of(theirs)[0]["prior"]["data_offsets"] != fields["prior"]["data_offsets"]
    assert same(codec.decode(theirs, KEY), kv)


def test_no_truncation_is_read():
    data = codec.encode(KEY, make_kv())
    for length in range(len(data)):
        with pytest.raises(DamagedChunkError):
            codec.decode(data[:length], KEY)


def test_no_flipped_bit_is_read():
    data = codec.encode(KEY, make_kv(tokens=2))
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DamagedChunkError, ForeignChunkError)) as raised:
            codec.decode(altered, KEY)
        assert "\n" not in str(raised.value)


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_damage(data):
    for junk in (data, struct.pack("<Q", len(data)) + data):
        with pytest.raises(DamagedChunkError):
            codec.decode(junk, KEY)


@pytest.mark.parametrize("extra", [b"\0", b"x" * 64])
def test_trailing_bytes_are_damage(extra):
    with pytest.raises(DamagedChunkError, match="follow"):
        codec.decode(codec.encode(KEY, make_kv()) + extra, KEY)


@pytest.mark.parametrize("length", [2**16 + 8, 2**40, 2**63, 2**64 - 1])
def test_absurd_header_lengths_are_damage(length):
    data = struct.pack("<Q", length) + codec.encode(KEY, make_kv())[8:]
    with pytest.raises(DamagedChunkError, match="header"):
        codec.decode(data, KEY)


def forge_fields(fields):
    """Yield (what is wrong, header fields): headers no writer of ours makes."""

    def changed(name, **change):
        return {**fields, name: {**fields[name], **change}}

    metadata = fields["__metadata__"]
    yield "values of another shape", changed("values", shape=[2, 1, 8, 4])
    yield "keys of rank 3", changed("keys", shape=[2, 4, 8])
    yield "negative sizes", changed("keys", shape=[-2, -1, 4, 8])
    yield "a size of 0", changed("keys", shape=[2, 1, 4, 0])
    yield "absurd sizes", changed("keys", shape=[2**62, 2**62, 2**62, 2**62])
    yield "sizes that are true", changed("keys", shape=[2, True, 4, 8])
    yield "an integer dtype", changed("keys", dtype="I32")
    yield "mixed dtypes", changed("keys", dtype="BF16", shape=[2, 2, 4, 8])
    yield "prior of another dtype", changed("prior", dtype="F16", shape=[8])
    yield "prior of another length", changed("prior", shape=[2, 2])
    yield "an overlap", changed("values", data_offsets=fields["keys"]["data_offsets"])
    yield "offsets beyond the end", changed("prior", data_offsets=[2**40, 2**40 + 16])
    yield "no values", {n: f for n, f in fields.items() if n != "values"}
    yield "another tensor", {**fields, "extra": {**fields["prior"]}}
    yield "a tensor that is text", {**fields, "prior": "x"}
    yield "another token count", {**fields, "__metadata__": {**metadata, "tokens": "5"}}
    yield (
        "a position that is no number",
        {
            **fields,
            "__metadata__": {**metadata, "position": "-1"},
        },
    )
    yield (
        "a key that is a path",
        {
            **fields,
            "__metadata__": {**metadata, "key": "../../etc/passwd"},
        },
    )
    yield (
        "a contradicting fingerprint",
        {
            **fields,
            "__metadata__": {**metadata, "fingerprint": OTHER_FINGERPRINT},
        },
    )


FORGERIES = dict(forge_fields(header_of(codec.encode(KEY, make_kv()))[0]))


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_headers_are_damage_even_with_a_right_checksum(what):
    _, body = header_of(codec.encode(KEY, make_kv()))
    fields = json.loads(json.dumps(FORGERIES[what]))
    try:
        data = sealed(fields, body)
    except (TypeError, KeyError):
        data = with_header(fields, body)
    with pytest.raises(DamagedChunkError, match=f"^{SAID[what]}$"):
        codec.decode(data, KEY)


SAID = {
    "values of another shape": r"values are torch.float32 \(2, 1, 8, 4\), keys are .*",
    "keys of rank 3": r"keys are torch.float32 \(2, 4, 8\), want float .*",
    "negative sizes": "keys is ill described",
    "a size of 0": "keys's shape and bytes contradict each other",
    "absurd sizes": "keys's shape and bytes contradict each other",
    "sizes that are true": "keys is ill described",
    "an integer dtype": "keys is ill described",
    "mixed dtypes": r"values are torch.float32 .*, keys are torch.bfloat16 \(2, 2, 4, 8\)",
    "prior of another dtype": r"prior is torch.float16 \(8,\), want float32 \(4,\)",
    "prior of another length": r"prior is torch.float32 \(2, 2\), want float32 \(4,\)",
    "an overlap": "values does not start where the last tensor ends",
    "offsets beyond the end": "prior does not start where the last tensor ends",
    "no values": "holds tensors 'keys, prior'",
    "another tensor": "holds tensors 'extra, keys, prior, values'",
    "a tensor that is text": "prior is ill described",
    "another token count": "header counts 5 tokens, keys 4",
    "a position that is no number": "position is no number",
    "a key that is a path": "metadata names no KV key",
    "a contradicting fingerprint": "key and fingerprint contradict each other",
}


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
        codec.decode(data, KEY)


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedChunkError, match=r"^no file$"):
        codec.read(tmp_path / "pipe", KEY)
    with pytest.raises(IsADirectoryError):
        codec.read(tmp_path, KEY)
    with pytest.raises(FileNotFoundError):
        codec.read(tmp_path / "absent", KEY)


def test_tensors_at_odd_offsets_are_damage():
    keys = torch.ones(1, 1, 1, 3, dtype=torch.float16)
    fields, body = header_of(codec.encode(KEY, ChunkKV(keys, keys, 0, torch.ones(1))))
    fields["prior"]["data_offsets"] = [6, 10]
    fields["values"]["data_offsets"] = [10, 16]
    with pytest.raises(DamagedChunkError, match="contradict"):
        codec.decode(sealed(fields, body), KEY)


def test_the_forger_of_these_tests_can_seal_an_honest_object():
    fields, body = header_of(codec.encode(KEY, make_kv()))
    fields["__metadata__"]["checksum"] = ""
    assert same(codec.decode(sealed(fields, body), KEY), make_kv())


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
        codec.decode(codec.encode(KEY, make_kv()), asked)


def test_another_format_version_is_foreign():
    fields, body = header_of(codec.encode(KEY, make_kv()))
    fields["__metadata__"]["format"] = "cacheblend-rag/999"
    with pytest.raises(ForeignChunkError, match="999"):
        codec.decode(sealed(fields, body), KEY)


def test_other_safetensors_files_are_damage():
    with pytest.raises(DamagedChunkError, match="metadata"):
        codec.decode(save({"weight": torch.zeros(3)}), KEY)
    with pytest.raises(DamagedChunkError, match="no chunk KV"):
        codec.decode(save({"weight": torch.zeros(3)}, metadata={"format": "pt"}), KEY)


def test_malformed_tensors_are_not_written():
    kv = make_kv()
    for wrong in (
        ChunkKV(kv.keys, kv.values[:1], 0),
        ChunkKV(kv.keys, kv.values.half(), 0),
        ChunkKV(kv.keys[0], kv.values[0], 0),
        ChunkKV(kv.keys.int(), kv.values.int(), 0),
        ChunkKV(kv.keys.double(), kv.values.double(), 0),
        ChunkKV(kv.keys, kv.values, 0, torch.zeros(5)),
        ChunkKV(kv.keys, kv.values, -1),
        ChunkKV(kv.keys[:, :, :0], kv.values[:, :, :0], 0),
    ):
        with pytest.raises(ValueError, match=r"keys|values|prior|position|dtype"):
            codec.encode(KEY, wrong)


@pytest.mark.parametrize(
    "text",
    ["", "-", "../../../etc/passwd", str(KEY) + "-", str(KEY).upper(), str(KEY) + "\n", "a" * 49],
)
def test_only_keys_are_parsed_as_keys(text):
    with pytest.raises(ValueError, match=r"KV key|hex digits"):
        KVKey.parse(text)


@pytest.mark.parametrize("key", [KEY, KVKey(KEY.chunk_id, KEY.fingerprint, chunk_id([7]))])
def test_keys_survive_their_text(key):
    assert KVKey.parse(str(key)) == key


def test_a_key_cannot_hold_a_path():
    with pytest.raises(ValueError, match="hex digits"):
        KVKey("../../../../etc/passwd", KEY.fingerprint)
    with pytest.raises(ValueError, match="hex digits"):
        KVKey(KEY.chunk_id, KEY.fingerprint, "../x")


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
