"""Chunk KV to bytes and back: one safetensors object a chunk, checked before it is trusted.

Layout: the safetensors header (8 bytes of length, JSON), then ``keys``, ``values`` and, where
stored, ``prior``. The header's metadata carries format, key, fingerprint, position, token count
and an xxh3_128 checksum over all of these, the tensors' dtypes and shapes, and their bytes.

``_pack`` and ``_unpack`` are the one place where tensors become stored tensors and back: a
compressing encoding belongs there, under a format of its own.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey

FORMAT = f"cacheblend-rag/{FORMAT_VERSION}"
MAX_HEADER_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 36

_PREFIX_BYTES = 8
_ALIGNMENT = 64
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = {"format", "key", "fingerprint", "position", "tokens", "checksum"}
_NUMBER = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Span:
    """One stored tensor: its dtype's safetensors name, its shape, its bytes within the body."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def encode(key: KVKey, kv: ChunkKV) -> bytes:
    """Return ``kv`` as one safetensors object; raises ValueError on malformed tensors."""
    return b"".join(encode_parts(key, kv))


def encode_parts(key: KVKey, kv: ChunkKV) -> list[bytes | memoryview]:
    """Return what ``encode`` joins, without copying tensors that are on the CPU and contiguous."""
    kv.validate()
    if kv.keys.dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype {kv.keys.dtype} is none of {', '.join(map(str, _DTYPE_NAMES))}")
    stored = {name: t.detach().cpu().contiguous() for name, t in _pack(kv).items()}
    views = {name: _bytes_of(tensor) for name, tensor in stored.items()}
    spans, start = {}, 0
    for name, tensor in stored.items():
        end = start + views[name].nbytes
        spans[name] = _Span(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start, end)
        start = end
    metadata = {
        "format": FORMAT,
        "key": str(key),
        "fingerprint": key.fingerprint,
        "position": str(kv.position),
        "tokens": str(kv.tokens),
    }
    metadata["checksum"] = _checksum(metadata, spans, views)
    return [_header(metadata, spans), *views.values()]


def decode(data: bytes | bytearray | memoryview, key: KVKey) -> ChunkKV:
    """Read what ``encode`` wrote. The tensors share ``data`` where it is writable, else one copy.

    Raises DamagedChunkError, or ForeignChunkError when it is another key's or format's.
    """
    view = memoryview(data)
    if not view.nbytes:
        raise DamagedChunkError("empty")
    writable = bytearray(view) if view.readonly else view
    return _decode(torch.frombuffer(writable, dtype=torch.uint8), key)


def read(path: str, key: KVKey) -> ChunkKV:
    """Read one file into memory of its own: what befalls the file later changes nothing.

    A memory map would save a copy, but end the process when the file is cut short, and pass on
    what is written into it after it was checked. Raises as ``decode`` does, and OSError
    (FileNotFoundError when there is no such file, another when it is a link).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedChunkError("no file")
        if not found.st_size:
            raise DamagedChunkError("empty")
        if found.st_size > MAX_BODY_BYTES:
            raise DamagedChunkError(f"more than {MAX_BODY_BYTES} bytes")
        try:
            raw = torch.empty(found.st_size, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(f"{path}: no memory for {found.st_size} bytes") from error
        left = _bytes_of(raw)
        while left:
            count = file.readinto(left)
            if not count:
                raise DamagedChunkError("was cut short")
            left = left[count:]
    return _decode(raw, key)


def _pack(kv: ChunkKV) -> dict[str, Tensor]:
    tensors = {"keys": kv.keys, "values": kv.values}
    if kv.prior is not None:
        tensors["prior"] = kv.prior
    return tensors


def _unpack(tensors: Mapping[str, Tensor], position: int) -> ChunkKV:
    return ChunkKV(tensors["keys"], tensors["values"], position, tensors.get("prior"))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(
    metadata: Mapping[str, str], spans: Mapping[str, _Span], views: Mapping[str, memoryview]
) -> str:
    """Return xxh3_128 (32 hex digits) over the metadata, the tensors' types and their bytes."""
    essential = {name: text for name, text in sorted(metadata.items()) if name != "checksum"}
    shapes = [[name, spans[name].dtype, *spans[name].shape] for name in sorted(spans)]
    digest = xxhash.xxh3_128(json.dumps([essential, shapes]).encode())
    for name in sorted(spans):
        digest.update(views[name])
    return str(digest.hexdigest())


def _header(metadata: Mapping[str, str], spans: Mapping[str, _Span]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, span in spans.items():
        offsets = [span.start, span.end]
        fields[name] = {"dtype": span.dtype, "shape": span.shape, "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_PREFIX_BYTES + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _decode(raw: Tensor, key: KVKey) -> ChunkKV:
    """Check a whole object, raw: (bytes,) uint8, and return views into it."""
    header, body = _split(raw)
    metadata, spans = _parse(header, body.numel())
    tensors = {
        name: body[span.start : span.end].view(_DTYPES[span.dtype]).view(span.shape)
        for name, span in spans.items()
    }
    views = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    if _checksum(metadata, spans, views) != metadata["checksum"]:
        raise DamagedChunkError("checksum does not match")
    if metadata["key"] != str(key):
        raise ForeignChunkError(f"holds {metadata['key']}, not {key}")
    kv = _unpack(tensors, int(metadata["position"]))
    try:
        kv.validate()
    except ValueError as error:
        raise DamagedChunkError(str(error)) from error
    if metadata["tokens"] != str(kv.tokens):
        raise DamagedChunkError(f"header counts {metadata['tokens']} tokens, keys {kv.tokens}")
    return kv


def _split(raw: Tensor) -> tuple[bytes, Tensor]:
    """Return the header's JSON text and the body, (bytes,) uint8."""
    if raw.numel() < _PREFIX_BYTES:
        raise DamagedChunkError("too short for a safetensors header")
    (length,) = struct.unpack("<Q", bytes(raw[:_PREFIX_BYTES].numpy()))
    start = _PREFIX_BYTES + length
    if length > MAX_HEADER_BYTES:
        raise DamagedChunkError(f"header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    if start > raw.numel():
        raise DamagedChunkError("truncated within its header")
    if start % _PREFIX_BYTES:
        raise DamagedChunkError("header is not padded to 8 bytes")
    if raw.numel() - start > MAX_BODY_BYTES:
        raise DamagedChunkError(f"more than {MAX_BODY_BYTES} bytes")
    return bytes(raw[_PREFIX_BYTES:start].numpy()), raw[start:]


def _parse(header: bytes, body_bytes: int) -> tuple[dict[str, str], dict[str, _Span]]:
    """Return metadata and spans; everything but the checksum and the key's match is checked."""
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedChunkError("header is no JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("__metadata__"), dict):
        raise DamagedChunkError("header carries no metadata")
    metadata = _parse_metadata(fields.pop("__metadata__"))
    if not {"keys", "values"} <= set(fields) <= {"keys", "values", "prior"}:
        raise DamagedChunkError(f"holds tensors {', '.join(sorted(fields))!r:.80}")
    spans = {name: _parse_span(name, field) for name, field in fields.items()}
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1].start):
        if span.start != position:
            raise DamagedChunkError(f"{name} does not start where the last tensor ends")
        position = span.end
    if position != body_bytes:
        raise DamagedChunkError(f"header describes {position} tensor bytes, {body_bytes} follow")
    return metadata, spans


def _parse_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    stored_format = metadata.get("format")
    if not isinstance(stored_format, str) or not stored_format.startswith("cacheblend-rag/"):
        raise DamagedChunkError("no chunk KV")
    if stored_format != FORMAT:
        raise ForeignChunkError(f"format is {stored_format!r:.80}, not {FORMAT!r}")
    if set(metadata) != _METADATA or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedChunkError("metadata is not that of a chunk KV")
    for name in ("position", "tokens"):
        if not _NUMBER.fullmatch(metadata[name]):
            raise DamagedChunkError(f"{name} is no number")
    try:
        key = KVKey.parse(metadata["key"])
    except ValueError as error:
        raise DamagedChunkError("metadata names no KV key") from error
    if key.fingerprint != metadata["fingerprint"]:
        raise DamagedChunkError("key and fingerprint contradict each other")
    return metadata


def _parse_span(name: str, field: Any) -> _Span:
    match field:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if (
            dtype in _DTYPES and all(type(n) is int and n >= 0 for n in (*shape, start, end))
        ):
            pass
        case _:
            raise DamagedChunkError(f"{name} is ill described")
    itemsize = _DTYPES[dtype].itemsize
    if end - start != prod(shape) * itemsize or start % itemsize:
        raise DamagedChunkError(f"{name}'s shape and bytes contradict each other")
    return _Span(dtype, tuple(shape), start, end)
