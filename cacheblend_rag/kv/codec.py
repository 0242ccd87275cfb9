"""Encodes chunk KV as one safetensors object per chunk, and checks it when decoding.

Layout: the safetensors header (8 bytes of length, JSON), then ``prior`` where there is one,
``scales`` where numbers are stored as codes (kv/precision.py), then ``kv``: (layers, 2, kv_heads,
tokens, row), keys before values, so that a layer is one range of bytes; a row has the head_dim
numbers of a token and head, or their codes. The header's metadata:

- ``format``, ``key``, ``position``: see FORMAT, KVKey, ChunkKV
- ``dtype``, ``precision``: the model's type, and whether its numbers or codes are stored
- ``mac``: the kind of digests, see kv/mac.py
- ``written``: when the chunk was first stored, a Unix time; 0 where no key vouches for it
- ``layers``: a digest of each layer's bytes, so that one is checked and used before the others
- ``head``: a digest of all of these, the tensors' descriptions, the prior and the scales

Objects come from stores that others may write to. A header's metadata and the shape of ``kv`` say
what the rest of it must be, and how long the object is; nothing else is read.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from cacheblend_rag.errors import BadSignatureError, DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv.chunk_kv import FORMAT_VERSION, ChunkKV, KVKey
from cacheblend_rag.kv.mac import CHECKSUM, DIGITS, MAC_NAMES, VARIABLE, Mac
from cacheblend_rag.kv.precision import FORMATS, head_dim_of, precision_of
from cacheblend_rag.settings import Precision

FORMAT = f"cacheblend-rag/{FORMAT_VERSION}"
NOT_FINITE = "holds NaN or infinity"
HEAD_BYTES = 1 << 14
"""Bytes of an object that are read first; they usually contain its header and prior."""
MAX_HEADER_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 36

_PREFIX_BYTES = 8
_ALIGNMENT = 64
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_STORED = {**_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8}
_NAMES_STORED = {dtype: name for name, dtype in _STORED.items()}
_DIGEST = f"[0-9a-f]{{{DIGITS}}}"
_METADATA = {
    "format": re.escape(FORMAT),
    "key": "[0-9a-f]{64}-[0-9a-f]{32}(-[0-9a-f]{32})?",
    "position": "0|[1-9][0-9]{0,9}",
    "dtype": "|".join(_DTYPES),
    "precision": "|".join(("native", *FORMATS)),
    "mac": "|".join(MAC_NAMES),
    "written": r"[0-9]{1,12}\.[0-9]{6}",
    "layers": f"({_DIGEST})+",
    "head": _DIGEST,
}
"""The metadata's fields, each with the regular expression of its value."""

Parts = list[bytes | memoryview]
"""One object's bytes in order, as separate buffers."""
Fields = dict[str, dict[str, Any]]
"""A safetensors header's entries: dtype, shape and offsets of each tensor, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A stored chunk without its layers, checked; and the position of each layer in the object.

    shape: of keys and of values, (layers, kv_heads, tokens, head_dim). dtype, precision, position,
    prior, scales: see ChunkKV. start: where layer 0 begins in the object. digests: of each layer.
    written_at: when the chunk was first stored, a Unix time, if the object is signed with a key.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    precision: Precision
    position: int
    prior: Tensor | None
    scales: Tensor | None
    start: int
    digests: Sequence[str]
    mac: Mac
    written_at: float | None

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, keys and values."""
        return prod(self._layer) * self._stored.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return self.span(0, self.shape[0])[1]

    @property
    def _stored(self) -> torch.dtype:
        packs = FORMATS.get(self.precision)
        return packs.codes if packs else self.dtype

    @property
    def _layer(self) -> tuple[int, int, int, int]:
        """The shape of one layer as it is stored, quantized or not."""
        _, kv_heads, tokens, head_dim = self.shape
        packs = FORMATS.get(self.precision)
        return 2, kv_heads, tokens, packs.row(head_dim) if packs else head_dim

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return where layers ``first`` to ``last - 1`` begin and end in the object."""
        return self.start + first * self.layer_bytes, self.start + last * self.layer_bytes

    def checked(self, first: int, last: int, raw: Tensor) -> ChunkKV:
        """Check the bytes of layers ``first`` to ``last - 1``; return these layers, views of them.

        Each layer's digest and numbers are checked together, while they are in the processor's
        cache. A writer with the store's key has checked the numbers. Raises DamagedChunkError.

        raw: ((last - first) * layer_bytes,) uint8.
        """
        size, text = self.layer_bytes, _bytes_of(raw)
        if raw.numel() != (last - first) * size:
            raise DamagedChunkError(f"layer {first + raw.numel() // size} was cut short")
        found = self._layers(first, last, raw)
        for index in range(last - first):
            own = text[index * size : (index + 1) * size]
            if not self.mac.holds(self.digests[first + index], own):
                raise DamagedChunkError(f"checksum of layer {first + index} does not match")
            if not self.mac.by_key and not found.layer(index).is_finite():
                raise DamagedChunkError(NOT_FINITE)
        return found

    def _layers(self, first: int, last: int, raw: Tensor) -> ChunkKV:
        numbers = raw.view(self._stored).view(last - first, *self._layer)
        if self.scales is None:
            return ChunkKV(numbers, self.position, self.prior)
        return ChunkKV(numbers, self.position, self.prior, self.scales[first:last], self.dtype)


class ChunkObject:
    """A chunk as one safetensors object of ``nbytes``; ``parts`` computes the digests.

    Layers that are on the CPU and contiguous are not copied.

    Args:
        key: the name it is stored under.
        kv: a whole chunk of valid form and finite numbers.
        mac: the MAC of its bytes.
        written_at: when the chunk was first stored, a Unix time.

    Raises:
        ValueError: for a dtype that is not stored, or too many layers for a header.
    """

    def __init__(
        self, key: KVKey, kv: ChunkKV, mac: Mac = CHECKSUM, *, written_at: float = 0.0
    ) -> None:
        if kv.dtype not in _NAMES:
            raise ValueError(f"dtype {kv.dtype} is none of {', '.join(map(str, _NAMES))}")
        own = [tensor for tensor in (kv.prior, kv.scales) if tensor is not None]
        self._own = [_bytes_of(tensor.cpu().contiguous()) for tensor in own]
        self._layers = [_bytes_of(one.contiguous()) for one in kv.numbers.detach().cpu()]
        self._mac = mac
        self._metadata = {
            "format": FORMAT,
            "key": str(key),
            "position": str(kv.position),
            "dtype": _NAMES[kv.dtype],
            "precision": kv.precision,
            "mac": mac.name,
            "written": f"{max(written_at, 0) if mac.by_key else 0:.6f}",
        }
        optional = () if kv.prior is None else ("prior",)
        self._fields = _fields_of(self._metadata, kv.numbers.shape, optional)
        blank = "0" * DIGITS
        head = self._header(blank * len(self._layers), blank)
        self.nbytes = len(head) + sum(part.nbytes for part in (*self._own, *self._layers))

    def parts(self) -> Parts:
        """Return the object's bytes in pieces: the header, its own tensors, then each layer."""
        layers = "".join(self._mac.digest(layer) for layer in self._layers)
        metadata = {**self._metadata, "layers": layers}
        head = self._mac.digest(_essential(metadata, self._fields), *self._own)
        return [self._header(layers, head), *self._own, *self._layers]

    def _header(self, layers: str, head: str) -> bytes:
        metadata = {**self._metadata, "layers": layers, "head": head}
        text = _compact({"__metadata__": metadata, **self._fields})
        text += b" " * (-(_PREFIX_BYTES + len(text)) % _ALIGNMENT)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"too many layers for a header of {MAX_HEADER_BYTES} bytes")
        return struct.pack("<Q", len(text)) + text


def read_head(
    read: Callable[[int, int], Tensor], nbytes: int, key: KVKey, mac: Mac = CHECKSUM
) -> Head:
    """Read and check the head of an object.

    Nothing is asked for that the object does not have or that is beyond a head's limits.

    Args:
        read: returns the object's bytes from start to end, (end - start,) uint8.
        nbytes: of the whole object.
        key: the chunk that it should be.
        mac: the store's MAC.

    Raises:
        DamagedChunkError: when it is no chunk KV, cut short or altered.
        BadSignatureError: when it was not written with the store's key.
        ForeignChunkError: when it is another key's or format's; and what ``read`` raises.
    """
    first = read(0, min(nbytes, HEAD_BYTES))
    start = _body_start(first, nbytes)
    if start > first.numel():
        first = read(0, start)
    metadata, told = _parsed(bytes(first[_PREFIX_BYTES:start].numpy()))
    _check_mac(metadata["mac"], mac)
    fields = _checked_fields(metadata, told, nbytes - start)
    own: dict[str, Tensor] = {}
    for name, field in fields.items():
        if name != "kv":
            begin, end = (start + offset for offset in field["data_offsets"])
            raw = first[begin:end] if end <= first.numel() else read(begin, end)
            # not a view: it would hold on to what it lies in
            own[name] = raw.clone().view(_STORED[field["dtype"]]).view(field["shape"])
    prior, scales = own.get("prior"), own.get("scales")
    essential = _essential(metadata, fields)
    if not mac.holds(metadata["head"], essential, *map(_bytes_of, own.values())):
        if mac.by_key:
            raise BadSignatureError("was written with another key, or is damaged")
        raise DamagedChunkError("checksum of the head does not match")
    if metadata["key"] != str(key):
        raise ForeignChunkError(f"holds {metadata['key']}, not {key}")
    if prior is not None and not prior.isfinite().all():
        raise DamagedChunkError(NOT_FINITE)
    precision, (layers, _, kv_heads, tokens, row) = metadata["precision"], fields["kv"]["shape"]
    if scales is not None and not FORMATS[precision].are_written(scales):
        raise DamagedChunkError("scales are out of the range that this version writes")
    return Head(
        shape=(layers, kv_heads, tokens, head_dim_of(precision, row)),
        dtype=_DTYPES[metadata["dtype"]],
        precision=precision_of(_STORED[fields["kv"]["dtype"]]),
        position=int(metadata["position"]),
        prior=prior,
        scales=scales,
        start=start + fields["kv"]["data_offsets"][0],
        digests=re.findall(_DIGEST, metadata["layers"]),
        mac=mac,
        written_at=float(metadata["written"]) if mac.by_key else None,
    )


def _body_start(first: Tensor, nbytes: int) -> int:
    """Return the offset of the tensors in an object; first: its first bytes, uint8."""
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
        raise DamagedChunkError(f"tensors take {nbytes - start} bytes, more than {MAX_BODY_BYTES}")
    return start


def _parsed(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a header's metadata, checked by _METADATA, and its other entries, unchecked."""
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedChunkError("header is no JSON") from error
    metadata = fields.pop("__metadata__", None) if isinstance(fields, dict) else None
    if not isinstance(metadata, dict):
        raise DamagedChunkError("header carries no metadata")
    stored_format = metadata.get("format")
    if not isinstance(stored_format, str) or not stored_format.startswith("cacheblend-rag/"):
        raise DamagedChunkError("no chunk KV")
    if stored_format != FORMAT:
        raise ForeignChunkError(f"format is {stored_format!r:.80}, not {FORMAT!r}")
    if metadata.keys() != _METADATA.keys():
        raise DamagedChunkError("metadata is not that of a chunk KV")
    for name, pattern in _METADATA.items():
        if not isinstance(metadata[name], str) or not re.fullmatch(pattern, metadata[name]):
            raise DamagedChunkError(f"{name} is not that of a chunk KV")
    return metadata, fields


def _check_mac(name: str, mac: Mac) -> None:
    """Check that an object is signed with the store's kind of MAC."""
    if name == mac.name:
        return
    if mac.by_key:
        raise BadSignatureError("was not written with the store's key")
    raise BadSignatureError(f"was written with a key, and {VARIABLE} is not set")


def _checked_fields(
    metadata: Mapping[str, str], fields: Mapping[str, Any], body_bytes: int
) -> Fields:
    """Return the entries that a writer makes for this metadata and shape; others are refused."""
    match fields.get("kv"):
        case {"shape": [layers, 2, _, _, row] as shape} if (
            all(type(size) is int and size > 0 for size in shape)
            and head_dim_of(metadata["precision"], row) > 0
        ):
            wanted = _fields_of(metadata, shape, fields)
        case _:
            raise DamagedChunkError("shape of kv is not (layers, 2, kv_heads, tokens, row size)")
    if len(metadata["layers"]) != layers * DIGITS:
        raise DamagedChunkError(f"header has no checksum for each of {layers} layers")
    if fields != wanted:
        raise DamagedChunkError("header does not describe the tensors of its chunk")
    described = wanted["kv"]["data_offsets"][1]
    if described != body_bytes:
        raise DamagedChunkError(f"header describes {described} tensor bytes, {body_bytes} follow")
    return wanted


def _fields_of(metadata: Mapping[str, str], shape: Sequence[int], names: Container[str]) -> Fields:
    """Return a header's description of a chunk's tensors, in the order of their bytes.

    shape: of ``kv``. names: has ``prior`` if there is one.
    """
    layers, _, kv_heads, tokens, row = shape
    tensors: dict[str, tuple[str, list[int]]] = {}
    if "prior" in names:
        tensors["prior"] = "F32", [tokens]
    if packs := FORMATS.get(metadata["precision"]):
        scales = packs.scales_shape(kv_heads, packs.head_dim(row))
        tensors["scales"] = _NAMES_STORED[packs.scales], [layers, *scales]
    tensors["kv"] = _NAMES_STORED[packs.codes] if packs else metadata["dtype"], list(shape)
    start, fields = 0, Fields()
    for name, (dtype, own) in tensors.items():
        end = start + prod(own) * _STORED[dtype].itemsize
        fields[name] = {"dtype": dtype, "shape": own, "data_offsets": [start, end]}
        start = end
    return fields


def _essential(metadata: Mapping[str, str], fields: Fields) -> bytes:
    """Return what the digest of the head is of, besides prior and scales."""
    essential = {name: text for name, text in metadata.items() if name != "head"}
    return _compact([sorted(essential.items()), sorted(fields.items())])


def _compact(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
