"""Chunk KV to bytes and back: one safetensors object a chunk, checked before it is trusted.

Layout of format 2: the safetensors header (8 bytes of length, JSON), then ``prior`` where there is
one, ``scales`` where numbers are stored in a byte, then ``kv``: (layers, 2, kv_heads, tokens,
head_dim), keys before values, so that a layer is one range of bytes. The header's metadata carries
format, key, fingerprint, position, token count, precision (``native``, or ``fp8`` or ``int8`` and
what type it stands for), ``seal`` (the kind of digests, see kv/mac.py), ``written`` (when the
chunk was first stored, a Unix time; where a key vouches for it), ``layers`` (a digest of each
layer's bytes) and ``head``: one over all of these, the tensors' dtypes and shapes, the prior
and the scales. So a layer can be read, checked and used before the others are there. Format 1
(``keys``, ``values``, ``prior``, one checksum) is still read, as a whole.

How numbers become bytes and back is told by kv/precision.py. The codec rounds nothing: a chunk has
its numbers rounded before, and is stored as what its ``precision`` says of it. Read, it stays
packed: who needs the numbers unpacks them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError, UnsealedChunkError
from cacheblend_rag.kv.background import BESIDE_BYTES, begin
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, is_finite
from cacheblend_rag.kv.mac import CHECKSUM, SEALS, VARIABLE, Mac
from cacheblend_rag.kv.packed_kv import (
    LayerKV,
    PackedKV,
    PackedLayer,
    StoredKV,
    packed,
    unpacked,
)
from cacheblend_rag.kv.precision import CODES, are_finite, are_written, scales
from cacheblend_rag.settings import Precision

OLD_FORMAT = "cacheblend-rag/1"
FORMAT = "cacheblend-rag/2"
MAX_HEADER_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 36
NOT_FINITE = "holds NaN or infinity"
HEAD_BYTES = 1 << 14
"""Bytes of an object that are read first: as a rule its header and prior are among them."""

Parts = list[bytes | memoryview]
"""One object's bytes in order: none is joined to another."""

_PREFIX_BYTES = 8
_ALIGNMENT = 64
_DIGEST_DIGITS = 32
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_STORED = {**_DTYPES, "F8_E4M3": CODES["fp8"], "I8": CODES["int8"]}
_CODE_NAMES = {"fp8": "F8_E4M3", "int8": "I8"}
_NAMED = {"format", "key", "fingerprint", "position", "tokens"}
_METADATA = {
    OLD_FORMAT: {*_NAMED, "checksum"},
    FORMAT: {*_NAMED, "precision", "seal", "layers", "head"},
}
_OPTIONAL = {OLD_FORMAT: set[str](), FORMAT: {"written"}}
_TENSORS = {OLD_FORMAT: {"keys", "values"}, FORMAT: {"kv"}}
_NUMBER = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,12}\.[0-9]{6}", re.ASCII)
_DIGESTS = re.compile("[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class _Span:
    """One stored tensor: its dtype's safetensors name, its shape, its bytes within the body."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Header:
    """A parsed header. start: where the body begins in the object."""

    metadata: dict[str, str]
    spans: dict[str, _Span]
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """All of a stored chunk but its layers, checked; and which bytes of the object are a layer.

    dtype: of keys and values. precision: how these are stored. scales: (layers, scales) int8, None
    where numbers are stored as they are. nbytes: of the whole object. start: where layer 0 begins
    in it. prior: (tokens,) float32. written_at: when the chunk was first stored, a Unix time, where
    the object says so and its seal is one by key.
    """

    position: int
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    prior: Tensor | None
    nbytes: int
    start: int
    checksums: tuple[str, ...]
    precision: Precision = "native"
    scales: Tensor | None = None
    seal: Mac = CHECKSUM
    written_at: float | None = None

    @property
    def _stored(self) -> torch.dtype:
        return CODES.get(self.precision, self.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, keys and values."""
        return 2 * self.kv_heads * self.tokens * self.head_dim * self._stored.itemsize

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return where layers ``first`` to ``last - 1`` begin and end in the object."""
        return self.start + first * self.layer_bytes, self.start + last * self.layer_bytes

    def layer(self, index: int, raw: Tensor) -> LayerKV:
        """Check one layer's bytes, raw: (layer_bytes,) uint8; return views of them.

        Raises DamagedChunkError.
        """
        if raw.numel() != self.layer_bytes:
            raise DamagedChunkError(f"layer {index} was cut short")
        if not self.seal.holds(self.checksums[index], _bytes_of(raw)):
            raise DamagedChunkError(f"checksum of layer {index} does not match")
        kv = raw.view(self._stored).view(2, self.kv_heads, self.tokens, self.head_dim)
        if self.scales is None:
            if not is_finite(kv):
                raise DamagedChunkError(NOT_FINITE)
            return kv[0], kv[1]
        packed_as = (kv, self.scales[index], self.precision, self.dtype)
        if not are_finite(*packed_as):
            raise DamagedChunkError(NOT_FINITE)
        return PackedLayer.of(*packed_as)

    def whole(self, raw: Tensor) -> StoredKV:
        """Check all layers' bytes, raw: (layers * layer_bytes,) uint8; return views of them.

        Of many bytes, every other layer is checked beside this thread.
        """
        if raw.numel() < BESIDE_BYTES:
            self._check(raw, slice(None))
        else:
            others = begin(partial(self._check, raw, slice(1, None, 2)))
            try:
                self._check(raw, slice(None, None, 2))
            finally:
                others.result()
        shape = (self.layers, 2, self.kv_heads, self.tokens, self.head_dim)
        kv = raw.view(self._stored).view(shape)
        if self.scales is None:
            keys, values = kv.unbind(1)
            return ChunkKV(keys, values, self.position, self.prior)
        return PackedKV(kv, self.scales, self.dtype, self.position, self.prior, self.precision)

    def _check(self, raw: Tensor, which: slice) -> None:
        for index in range(self.layers)[which]:
            size = self.layer_bytes
            self.layer(index, raw[index * size : (index + 1) * size])


class EncodedChunk:
    """A chunk as one safetensors object, whose digests are taken when its head is asked for.

    So whoever can writes the body at its place meanwhile. Layers that are on the CPU, contiguous
    and stored as they are, are not copied. body: its bytes in order. head_bytes: those before.

    kv: of the form that it promises. check: looks at its numbers where nobody has; it is called
    when the head is asked for, and what it raises is raised there. written_at: when the chunk was
    first stored, a Unix time, to be kept in the object; None keeps none. Raises ValueError for a
    dtype that is not stored.
    """

    def __init__(
        self,
        key: KVKey,
        kv: StoredKV,
        seal: Mac = CHECKSUM,
        *,
        check: Callable[[], None] = lambda: None,
        written_at: float | None = None,
    ) -> None:
        if kv.dtype not in _DTYPE_NAMES:
            known = ", ".join(map(str, _DTYPE_NAMES))
            raise ValueError(f"dtype {kv.dtype} is none of {known}")
        kv = kv if isinstance(kv, PackedKV) else packed(kv, kv.precision)
        own = [] if kv.prior is None else [_bytes_of(kv.prior.detach().cpu().contiguous())]
        self._layers = _layers_of(kv)
        if isinstance(kv, PackedKV):
            own.append(_bytes_of(kv.exponents.cpu().contiguous()))
        self._own, self._spans, self._seal, self._check = own, _spans_of(kv), seal, check
        self._metadata = {
            "format": FORMAT,
            "key": str(key),
            "fingerprint": key.fingerprint,
            "position": str(kv.position),
            "tokens": str(kv.tokens),
            "precision": _precision_text(kv),
            "seal": seal.name,
            **({} if written_at is None else {"written": f"{max(written_at, 0):.6f}"}),
        }
        self.body = [*own, *(part for parts in self._layers for part in parts)]
        blank = "0" * _DIGEST_DIGITS
        self.head_bytes = len(self._header(blank * len(self._layers), blank))
        self.nbytes = self.head_bytes + sum(part.nbytes for part in self.body)

    def head(self) -> bytes:
        """Return what stands before the body, once the numbers are checked."""
        self._check()
        layers = "".join(self._seal.digest(*parts) for parts in self._layers)
        metadata = {**self._metadata, "layers": layers}
        return self._header(layers, _head_digest(self._seal, metadata, self._spans, *self._own))

    def parts(self) -> Parts:
        """Return all of it, in order."""
        return [self.head(), *self.body]

    def _header(self, layers: str, head: str) -> bytes:
        return _header({**self._metadata, "layers": layers, "head": head}, self._spans)


def encode(key: KVKey, kv: ChunkKV, seal: Mac = CHECKSUM) -> bytes:
    """Return ``kv`` as one safetensors object; raises ValueError on malformed tensors."""
    kv.validate()
    return b"".join(EncodedChunk(key, kv, seal).parts())


def decode(data: bytes | bytearray | memoryview, key: KVKey, seal: Mac = CHECKSUM) -> ChunkKV:
    """Read what ``encode`` wrote, unpacked. The tensors share ``data`` where they can.

    Raises DamagedChunkError, or ForeignChunkError when it is another key's or format's.
    """
    view = memoryview(data)
    if not view.nbytes:
        raise DamagedChunkError("empty")
    writable = bytearray(view) if view.readonly else view
    return unpacked(decode_raw(torch.frombuffer(writable, dtype=torch.uint8), key, seal))


def decode_raw(raw: Tensor, key: KVKey, seal: Mac = CHECKSUM) -> StoredKV:
    """As decode, of raw: (bytes,) uint8, on the CPU, as it is kept; the tensors are views of it."""
    if not raw.numel():
        raise DamagedChunkError("empty")
    head = read_head(lambda start, end: raw[start:end], raw.numel(), key, seal)
    if head is None:
        return _decode_old(raw, key)
    return head.whole(raw[slice(*head.span(0, head.layers))])


def read_head(
    read: Callable[[int, int], Tensor], nbytes: int, key: KVKey, seal: Mac = CHECKSUM
) -> Head | None:
    """Read and check the head of an object of ``nbytes``; None where it is of format 1.

    read: returns the object's bytes from start to end, (end - start,) uint8. Nothing is asked for
    that the object does not have or that is beyond a head's limits. Raises as ``decode`` does, and
    what ``read`` raises.
    """
    first = read(0, min(nbytes, HEAD_BYTES))
    start = _body_start(first, nbytes)
    if start > first.numel():
        first = read(0, start)
    header = _parse(bytes(first[_PREFIX_BYTES:start].numpy()), start, nbytes - start)
    _check_seal(header.metadata, seal)
    if header.metadata["format"] == OLD_FORMAT:
        return None
    _check_shapes(header.metadata, header.spans)
    own: dict[str, Tensor] = {}
    for name, span in header.spans.items():
        if name != "kv":
            begin, end = start + span.start, start + span.end
            raw = first[begin:end] if end <= first.numel() else read(begin, end)
            # not a view: it would hold on to what it lies in
            own[name] = raw.clone().view(_STORED[span.dtype]).view(span.shape)
    return _checked_head(header, own, nbytes, key, seal)


def _layers_of(kv: StoredKV) -> list[list[memoryview]]:
    """Return each layer's bytes: one part where its keys and values lie side by side, else two."""
    if isinstance(kv, PackedKV):
        return [[_bytes_of(codes.contiguous())] for codes in kv.codes.cpu()]
    keys, values = kv.keys.detach().cpu(), kv.values.detach().cpu()
    return [_side_by_side(*layer) for layer in zip(keys, values, strict=True)]


def _side_by_side(keys: Tensor, values: Tensor) -> list[memoryview]:
    keys, values = keys.contiguous(), values.contiguous()
    end = keys.data_ptr() + keys.nbytes
    same = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    if same and end == values.data_ptr():
        return [_bytes_of(keys.as_strided((2 * keys.numel(),), (1,)))]
    return [_bytes_of(keys), _bytes_of(values)]


def _precision_text(kv: StoredKV) -> str:
    """Return what a header says of the numbers: codes tell nothing of the type they stand for."""
    if kv.precision == "native":
        return kv.precision
    return f"{kv.precision}/{_DTYPE_NAMES[kv.dtype]}"


def _precision_of(metadata: Mapping[str, str], stored: str) -> tuple[Precision, torch.dtype]:
    """Return the precision and the type of the numbers; stored: the type of what is stored."""
    text = metadata["precision"]
    if text == "native" and stored in _DTYPES:
        return "native", _DTYPES[stored]
    kind, _, dtype = text.partition("/")
    for precision, name in _CODE_NAMES.items():
        if kind == precision and stored == name and dtype in _DTYPES:
            return cast(Precision, precision), _DTYPES[dtype]
    raise ForeignChunkError(f"precision is {text!r:.80} of {stored}, which nothing here writes")


def _spans_of(kv: StoredKV) -> dict[str, _Span]:
    layers, kv_heads, tokens, head_dim = kv.shape
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    if kv.prior is not None:
        shapes["prior"] = ("F32", (tokens,))
    code = _CODE_NAMES.get(kv.precision, _DTYPE_NAMES[kv.dtype])
    if kv.precision != "native":
        shapes["scales"] = ("I8", (layers, scales(kv_heads, tokens, head_dim, kv.precision)))
    shapes["kv"] = (code, (layers, 2, kv_heads, tokens, head_dim))
    start, spans = 0, {}
    for name, (dtype, shape) in shapes.items():
        end = start + prod(shape) * _STORED[dtype].itemsize
        spans[name] = _Span(dtype, shape, start, end)
        start = end
    return spans


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _head_digest(
    seal: Mac, metadata: Mapping[str, str], spans: Mapping[str, _Span], *tensors: memoryview
) -> str:
    """Return the digest of the metadata, the tensors' types, and the tensors that are no layers."""
    essential = {name: text for name, text in sorted(metadata.items()) if name != "head"}
    return seal.digest(json.dumps([essential, _shapes(spans)]).encode(), *tensors)


def _shapes(spans: Mapping[str, _Span]) -> list[list[Any]]:
    return [[name, spans[name].dtype, *spans[name].shape] for name in sorted(spans)]


def _header(metadata: Mapping[str, str], spans: Mapping[str, _Span]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, span in spans.items():
        offsets = [span.start, span.end]
        fields[name] = {"dtype": span.dtype, "shape": span.shape, "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_PREFIX_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"keys have too many layers for a header of {MAX_HEADER_BYTES} bytes")
    return struct.pack("<Q", len(text)) + text


def _check_shapes(metadata: Mapping[str, str], spans: Mapping[str, _Span]) -> None:
    """Check what a header of format 2 says of its tensors, before any is read."""
    shape = spans["kv"].shape
    if len(shape) != 5 or 0 in shape or shape[1] != 2:
        raise DamagedChunkError(
            f"kv is {shape}, want (layers, 2, kv_heads, tokens, head_dim), none of them 0"
        )
    layers, tokens, digests = shape[0], shape[3], metadata["layers"]
    if len(digests) != layers * _DIGEST_DIGITS or not _DIGESTS.fullmatch(digests):
        raise DamagedChunkError(f"header has no checksum for each of {layers} layers")
    if metadata["tokens"] != str(tokens):
        raise DamagedChunkError(f"header counts {metadata['tokens']} tokens, keys {tokens}")
    prior = spans.get("prior")
    if prior is not None and (prior.shape != (tokens,) or prior.dtype != "F32"):
        raise DamagedChunkError(
            f"prior is {_STORED[prior.dtype]} {prior.shape}, want float32 ({tokens},)"
        )
    precision, _ = _precision_of(metadata, spans["kv"].dtype)
    _check_scales(spans.get("scales"), precision, shape)


def _check_scales(span: _Span | None, precision: Precision, shape: tuple[int, ...]) -> None:
    """shape: (layers, 2, kv_heads, tokens, head_dim)."""
    layers, _, kv_heads, tokens, head_dim = shape
    wanted = (
        None if precision == "native" else (layers, scales(kv_heads, tokens, head_dim, precision))
    )
    if wanted is None and span is None:
        return
    if span is None or span.shape != wanted or span.dtype != "I8":
        found = "none" if span is None else f"{_STORED[span.dtype]} {span.shape}"
        raise DamagedChunkError(f"scales are {found}, {precision} has {wanted or 'none'}")


def _check_seal(metadata: Mapping[str, str], seal: Mac) -> None:
    """Check that an object is vouched for in the way that is asked for."""
    found = metadata.get("seal", CHECKSUM.name)
    if found not in SEALS:
        raise DamagedChunkError(f"is sealed in no known way ({found!r:.40})")
    if found == seal.name:
        return
    if seal.by_key:
        raise UnsealedChunkError("was not written with the store's key")
    raise UnsealedChunkError(f"was written with a key, and {VARIABLE} is not set")


def _checked_head(
    header: _Header, own: Mapping[str, Tensor], nbytes: int, key: KVKey, seal: Mac
) -> Head:
    metadata, span = header.metadata, header.spans["kv"]
    tensors = [_bytes_of(own[name]) for name in ("prior", "scales") if name in own]
    if _head_digest(seal, metadata, header.spans, *tensors) != metadata["head"]:
        if seal.by_key:
            raise UnsealedChunkError("was written with another key, or is damaged")
        raise DamagedChunkError("checksum of the head does not match")
    if metadata["key"] != str(key):
        raise ForeignChunkError(f"holds {metadata['key']}, not {key}")
    prior = own.get("prior")
    if prior is not None and not prior.isfinite().all():
        raise DamagedChunkError(NOT_FINITE)
    if "scales" in own and not are_written(own["scales"]):
        raise DamagedChunkError("scales are beyond those that are written")
    layers, _, kv_heads, tokens, head_dim = span.shape
    precision, dtype = _precision_of(metadata, span.dtype)
    return Head(
        position=int(metadata["position"]),
        layers=layers,
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        dtype=dtype,
        prior=prior,
        nbytes=nbytes,
        start=header.start + span.start,
        checksums=tuple(re.findall(f".{{{_DIGEST_DIGITS}}}", metadata["layers"])),
        precision=precision,
        scales=own.get("scales"),
        seal=seal,
        written_at=float(metadata["written"]) if seal.by_key and "written" in metadata else None,
    )


def _decode_old(raw: Tensor, key: KVKey) -> ChunkKV:
    """Check a whole object of format 1, raw: (bytes,) uint8, and return views into it."""
    start = _body_start(raw, raw.numel())
    header = _parse(bytes(raw[_PREFIX_BYTES:start].numpy()), start, raw.numel() - start)
    body, metadata, spans = raw[start:], header.metadata, header.spans
    tensors = {
        name: body[span.start : span.end].view(_DTYPES[span.dtype]).view(span.shape)
        for name, span in spans.items()
    }
    if _old_checksum(metadata, spans, tensors) != metadata["checksum"]:
        raise DamagedChunkError("checksum does not match")
    if metadata["key"] != str(key):
        raise ForeignChunkError(f"holds {metadata['key']}, not {key}")
    position = int(metadata["position"])
    kv = ChunkKV(tensors["keys"], tensors["values"], position, tensors.get("prior"))
    try:
        kv.validate()
    except ValueError as error:
        raise DamagedChunkError(str(error)) from error
    if metadata["tokens"] != str(kv.tokens):
        raise DamagedChunkError(f"header counts {metadata['tokens']} tokens, keys {kv.tokens}")
    return kv


def _old_checksum(
    metadata: Mapping[str, str], spans: Mapping[str, _Span], tensors: Mapping[str, Tensor]
) -> str:
    """Return xxh3_128 over the metadata, the tensors' types and their bytes."""
    essential = {name: text for name, text in sorted(metadata.items()) if name != "checksum"}
    digest = xxhash.xxh3_128(json.dumps([essential, _shapes(spans)]).encode())
    for name in sorted(spans):
        digest.update(_bytes_of(tensors[name]))
    return str(digest.hexdigest())


def _body_start(first: Tensor, nbytes: int) -> int:
    """Return where the body begins in an object of nbytes; first: its first bytes, uint8."""
    if first.numel() < _PREFIX_BYTES:
        raise DamagedChunkError("too short for a safetensors header")
    (length,) = struct.unpack("<Q", bytes(first[:_PREFIX_BYTES].numpy()))
    start: int = _PREFIX_BYTES + length
    if length > MAX_HEADER_BYTES:
        raise DamagedChunkError(f"header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    if start > nbytes:
        raise DamagedChunkError("truncated within its header")
    if start % _PREFIX_BYTES:
        raise DamagedChunkError("header is not padded to 8 bytes")
    if nbytes - start > MAX_BODY_BYTES:
        raise DamagedChunkError(f"more than {MAX_BODY_BYTES} bytes")
    return start


def _parse(header: bytes, start: int, body_bytes: int) -> _Header:
    """Return metadata and spans; everything but checksums and the key's match is checked."""
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedChunkError("header is no JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("__metadata__"), dict):
        raise DamagedChunkError("header carries no metadata")
    metadata = _parse_metadata(fields.pop("__metadata__"))
    needed = _TENSORS[metadata["format"]]
    others = {"prior", "scales"} if metadata["format"] == FORMAT else {"prior"}
    if not needed <= set(fields) <= needed | others:
        raise DamagedChunkError(f"holds tensors {', '.join(sorted(fields))!r:.80}")
    known = _STORED if metadata["format"] == FORMAT else _DTYPES
    spans = {name: _parse_span(name, field, known) for name, field in fields.items()}
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1].start):
        if span.start != position:
            raise DamagedChunkError(f"{name} does not start where the last tensor ends")
        position = span.end
    if position != body_bytes:
        raise DamagedChunkError(f"header describes {position} tensor bytes, {body_bytes} follow")
    return _Header(metadata, spans, start)


def _parse_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    stored_format = metadata.get("format")
    if not isinstance(stored_format, str) or not stored_format.startswith("cacheblend-rag/"):
        raise DamagedChunkError("no chunk KV")
    if stored_format not in _METADATA:
        raise ForeignChunkError(f"format is {stored_format!r:.80}, not {FORMAT!r}")
    if set(metadata) - _OPTIONAL[stored_format] != _METADATA[stored_format] or not all(
        isinstance(v, str) for v in metadata.values()
    ):
        raise DamagedChunkError("metadata is not that of a chunk KV")
    if not _SECONDS.fullmatch(metadata.get("written", "0.000000")):
        raise DamagedChunkError("written is no time")
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


def _parse_span(name: str, field: Any, known: Mapping[str, torch.dtype]) -> _Span:
    match field:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if (
            dtype in known and all(type(n) is int and n >= 0 for n in (*shape, start, end))
        ):
            pass
        case _:
            raise DamagedChunkError(f"{name} is ill described")
    itemsize = known[dtype].itemsize
    if end - start != prod(shape) * itemsize or start % itemsize:
        raise DamagedChunkError(f"{name}'s shape and bytes contradict each other")
    return _Span(dtype, tuple(shape), start, end)
