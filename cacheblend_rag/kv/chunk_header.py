"""The header of a stored chunk: written, parsed, and checked before it is trusted.

An object is what safetensors calls a file: 8 bytes of length, JSON, then the tensors' bytes (the
body). kv/codec.py says which tensors and metadata a chunk has. A header comes from a store that
others may write to: it is checked against the object's size, the tensors' shapes and the digest of
the head before any of it is used.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from cacheblend_rag.errors import BadSignatureError, DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.mac import MAC_NAMES, VARIABLE, Mac
from cacheblend_rag.kv.packed_kv import StoredKV
from cacheblend_rag.kv.precision import CODES
from cacheblend_rag.settings import Precision

FORMAT = "cacheblend-rag/2"
MAX_HEADER_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 36
PREFIX_BYTES = 8
DIGEST_DIGITS = 32
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
STORED_DTYPES = {**DTYPES, "F8_E4M3": CODES, "I8": torch.int8}

_ALIGNMENT = 64
_METADATA = {
    "format", "key", "fingerprint", "position", "tokens", "precision", "mac", "layers", "head",
}  # fmt: skip
_OPTIONAL = {"written"}
_NUMBER = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}\.[0-9]{6}", re.ASCII)
_DIGESTS = re.compile("[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Span:
    """One stored tensor: its dtype's safetensors name, its shape, its bytes within the body."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """A parsed header. start: where the body begins in the object."""

    metadata: dict[str, str]
    spans: dict[str, Span]
    start: int


def body_start(first: Tensor, nbytes: int) -> int:
    """Return where the body begins in an object of nbytes; first: its first bytes, uint8."""
    if first.numel() < PREFIX_BYTES:
        raise DamagedChunkError("too short for a safetensors header")
    (length,) = struct.unpack("<Q", bytes(first[:PREFIX_BYTES].numpy()))
    start: int = PREFIX_BYTES + length
    if length > MAX_HEADER_BYTES:
        raise DamagedChunkError(f"header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    if start > nbytes:
        raise DamagedChunkError("truncated within its header")
    if start % PREFIX_BYTES:
        raise DamagedChunkError("header is not padded to 8 bytes")
    if nbytes - start > MAX_BODY_BYTES:
        raise DamagedChunkError(f"more than {MAX_BODY_BYTES} bytes")
    return start


def parse_header(header: bytes, start: int, body_bytes: int) -> ChunkHeader:
    """Return metadata and spans; everything but checksums and the key's match is checked."""
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedChunkError("header is no JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("__metadata__"), dict):
        raise DamagedChunkError("header carries no metadata")
    metadata = _parse_metadata(fields.pop("__metadata__"))
    if not {"kv"} <= set(fields) <= {"kv", "prior", "scales"}:
        raise DamagedChunkError(f"holds tensors {', '.join(sorted(fields))!r:.80}")
    spans = {name: _parse_span(name, field) for name, field in fields.items()}
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1].start):
        if span.start != position:
            raise DamagedChunkError(f"{name} does not start where the last tensor ends")
        position = span.end
    if position != body_bytes:
        raise DamagedChunkError(f"header describes {position} tensor bytes, {body_bytes} follow")
    return ChunkHeader(metadata, spans, start)


def _parse_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    stored_format = metadata.get("format")
    if not isinstance(stored_format, str) or not stored_format.startswith("cacheblend-rag/"):
        raise DamagedChunkError("no chunk KV")
    if stored_format != FORMAT:
        raise ForeignChunkError(f"format is {stored_format!r:.80}, not {FORMAT!r}")
    if set(metadata) - _OPTIONAL != _METADATA or not all(
        isinstance(v, str) for v in metadata.values()
    ):
        raise DamagedChunkError("metadata is not that of a chunk KV")
    if not _SECONDS.fullmatch(metadata.get("written", "0.000000")):
        raise DamagedChunkError("written is not a time")
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


def _parse_span(name: str, field: Any) -> Span:
    match field:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if (
            dtype in STORED_DTYPES and all(type(n) is int and n >= 0 for n in (*shape, start, end))
        ):
            pass
        case _:
            raise DamagedChunkError(f"{name} has an invalid description in the header")
    itemsize = STORED_DTYPES[dtype].itemsize
    if end - start != prod(shape) * itemsize or start % itemsize:
        raise DamagedChunkError(f"{name}'s shape and bytes contradict each other")
    return Span(dtype, tuple(shape), start, end)


def check_shapes(metadata: Mapping[str, str], spans: Mapping[str, Span]) -> None:
    """Check the shapes in a header, before any tensor is read."""
    shape = spans["kv"].shape
    if len(shape) != 5 or 0 in shape or shape[1] != 2:
        raise DamagedChunkError(
            f"kv is {shape}, want (layers, 2, kv_heads, tokens, head_dim), none of them 0"
        )
    layers, tokens, digests = shape[0], shape[3], metadata["layers"]
    if len(digests) != layers * DIGEST_DIGITS or not _DIGESTS.fullmatch(digests):
        raise DamagedChunkError(f"header has no checksum for each of {layers} layers")
    if metadata["tokens"] != str(tokens):
        raise DamagedChunkError(f"header counts {metadata['tokens']} tokens, keys {tokens}")
    prior = spans.get("prior")
    if prior is not None and (prior.shape != (tokens,) or prior.dtype != "F32"):
        raise DamagedChunkError(
            f"prior is {STORED_DTYPES[prior.dtype]} {prior.shape}, want float32 ({tokens},)"
        )
    precision, _ = precision_of(metadata, spans["kv"].dtype)
    _check_scales(spans.get("scales"), precision, shape)


def _check_scales(span: Span | None, precision: Precision, shape: tuple[int, ...]) -> None:
    """shape: (layers, 2, kv_heads, tokens, head_dim)."""
    layers, _, kv_heads, _, _ = shape
    wanted = None if precision == "native" else (layers, 2 * kv_heads)
    if wanted is None and span is None:
        return
    if span is None or span.shape != wanted or span.dtype != "I8":
        found = "none" if span is None else f"{STORED_DTYPES[span.dtype]} {span.shape}"
        raise DamagedChunkError(f"scales are {found}, {precision} has {wanted or 'none'}")


def check_mac(metadata: Mapping[str, str], mac: Mac) -> None:
    """Check that an object is signed with the store's kind of MAC."""
    found = metadata["mac"]
    if found not in MAC_NAMES:
        raise DamagedChunkError(f"has an unknown kind of digest ({found!r:.40})")
    if found == mac.name:
        return
    if mac.by_key:
        raise BadSignatureError("was not written with the store's key")
    raise BadSignatureError(f"was written with a key, and {VARIABLE} is not set")


def precision_text(kv: StoredKV) -> str:
    """Return a header's text about the numbers, since codes do not show the original type."""
    if kv.precision == "native":
        return kv.precision
    return f"{kv.precision}/{DTYPE_NAMES[kv.dtype]}"


def precision_of(metadata: Mapping[str, str], stored: str) -> tuple[Precision, torch.dtype]:
    """Return the precision and the type of the numbers; stored: the stored type."""
    text = metadata["precision"]
    if text == "native" and stored in DTYPES:
        return "native", DTYPES[stored]
    kind, _, dtype = text.partition("/")
    if kind == "fp8" and stored == "F8_E4M3" and dtype in DTYPES:
        return "fp8", DTYPES[dtype]
    raise ForeignChunkError(
        f"precision is {text!r:.80} of {stored}, which this version does not write"
    )


def spans_of(kv: StoredKV) -> dict[str, Span]:
    """Return the tensors of a stored chunk, in the order of their bytes."""
    layers, kv_heads, tokens, head_dim = kv.shape
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    if kv.prior is not None:
        shapes["prior"] = ("F32", (tokens,))
    code = DTYPE_NAMES[kv.dtype]
    if kv.precision != "native":
        code, shapes["scales"] = "F8_E4M3", ("I8", (layers, 2 * kv_heads))
    shapes["kv"] = (code, (layers, 2, kv_heads, tokens, head_dim))
    start, spans = 0, {}
    for name, (dtype, shape) in shapes.items():
        end = start + prod(shape) * STORED_DTYPES[dtype].itemsize
        spans[name] = Span(dtype, shape, start, end)
        start = end
    return spans


def head_digest(
    mac: Mac, metadata: Mapping[str, str], spans: Mapping[str, Span], *tensors: memoryview
) -> str:
    """Return the digest of the metadata, the tensors' types, and the tensors other than layers."""
    essential = {name: text for name, text in sorted(metadata.items()) if name != "head"}
    types = [[name, span.dtype, *span.shape] for name, span in sorted(spans.items())]
    return mac.digest(json.dumps([essential, types]).encode(), *tensors)


def header_bytes(metadata: Mapping[str, str], spans: Mapping[str, Span]) -> bytes:
    """Return a header as it is stored: its length, then padded JSON."""
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, span in spans.items():
        offsets = [span.start, span.end]
        fields[name] = {"dtype": span.dtype, "shape": span.shape, "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"keys have too many layers for a header of {MAX_HEADER_BYTES} bytes")
    return struct.pack("<Q", len(text)) + text
