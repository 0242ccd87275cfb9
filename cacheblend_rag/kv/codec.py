"""Encodes chunk KV as one safetensors object per chunk, and checks it when decoding.

Layout: the safetensors header (8 bytes of length, JSON), then ``prior`` where there is
one, ``scales`` where numbers are stored in a byte, then ``kv``: (layers, 2, kv_heads, tokens,
head_dim), keys before values, so that a layer is one range of bytes. The header's metadata carries
format, key, fingerprint, position, token count, precision (``native``, or ``fp8`` and what type it
stands for), ``mac`` (the kind of digests, see kv/mac.py), ``written`` (when the chunk was first
stored, a Unix time; where a key vouches for it), ``layers`` (a digest of each layer's bytes) and
``head``: one over all of these, the tensors' dtypes and shapes, the prior and the
scales. So a layer can be read, checked and used before the others are there.

kv/precision.py converts numbers to bytes and back. The codec rounds nothing: a chunk's numbers were
rounded before, and are stored as its ``precision`` says. A chunk stays packed when it is read;
callers that need the numbers unpack them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_rag.errors import BadSignatureError, DamagedChunkError, ForeignChunkError
from cacheblend_rag.kv.chunk_header import (
    DIGEST_DIGITS,
    DTYPE_NAMES,
    FORMAT,
    PREFIX_BYTES,
    STORED_DTYPES,
    ChunkHeader,
    body_start,
    check_mac,
    check_shapes,
    head_digest,
    header_bytes,
    parse_header,
    precision_of,
    precision_text,
    spans_of,
)
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, is_finite
from cacheblend_rag.kv.mac import CHECKSUM, Mac
from cacheblend_rag.kv.packed_kv import (
    LayerKV,
    PackedKV,
    PackedLayer,
    StoredKV,
    packed,
)
from cacheblend_rag.kv.precision import CODES, are_finite, are_written
from cacheblend_rag.settings import Precision

NOT_FINITE = "holds NaN or infinity"
HEAD_BYTES = 1 << 14
"""Bytes of an object that are read first; they usually contain its header and prior."""

Parts = list[bytes | memoryview]
"""One object's bytes in order, as separate buffers."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A stored chunk without its layers, checked; and the position of each layer in the object.

    dtype: of keys and values. precision: how these are stored. scales: (layers, 2 * kv_heads) int8,
    None if numbers are stored unchanged. nbytes: of the whole object. start: where layer 0 begins
    in it. prior: (tokens,) float32. written_at: when the chunk was first stored, a Unix time, if
    the object says so and is signed with a key.
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
    mac: Mac = CHECKSUM
    written_at: float | None = None

    @property
    def _stored(self) -> torch.dtype:
        return self.dtype if self.precision == "native" else CODES

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, keys and values."""
        return 2 * self.kv_heads * self.tokens * self.head_dim * self._stored.itemsize

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return where layers ``first`` to ``last - 1`` begin and end in the object."""
        return self.start + first * self.layer_bytes, self.start + last * self.layer_bytes

    def checked(self, first: int, last: int, raw: Tensor) -> list[LayerKV]:
        """Check the bytes of layers ``first`` to ``last - 1``; return each as views of them.

        raw: ((last - first) * layer_bytes,) uint8. Each layer's digest and numbers are checked
        together, while they are in the processor's cache. Raises DamagedChunkError.
        """
        size, text = self.layer_bytes, _bytes_of(raw)
        if raw.numel() != (last - first) * size:
            raise DamagedChunkError(f"layer {first + raw.numel() // size} was cut short")
        found: list[LayerKV] = []
        numbers = raw.view(self._stored).view(-1, 2, self.kv_heads, self.tokens, self.head_dim)
        for index, kv in enumerate(numbers.unbind(0)):
            layer = first + index
            if not self.mac.holds(self.checksums[layer], text[index * size : (index + 1) * size]):
                raise DamagedChunkError(f"checksum of layer {layer} does not match")
            if self.scales is None:
                is_sound, keys_values = is_finite(kv), kv.unbind(0)
                found.append((keys_values[0], keys_values[1]))
            else:
                is_sound = are_finite(kv, self.scales[layer], self.dtype)
                found.append(PackedLayer(kv, self.scales[layer], self.dtype))
            if not is_sound:
                raise DamagedChunkError(NOT_FINITE)
        return found

    def whole(self, raw: Tensor) -> StoredKV:
        """Check all layers' bytes, raw: (layers * layer_bytes,) uint8; return views of them."""
        self.checked(0, self.layers, raw)
        shape = (self.layers, 2, self.kv_heads, self.tokens, self.head_dim)
        kv = raw.view(self._stored).view(shape)
        if self.scales is None:
            keys, values = kv.unbind(1)
            return ChunkKV(keys, values, self.position, self.prior)
        return PackedKV(kv, self.scales, self.dtype, self.position, self.prior)


class ChunkObject:
    """A chunk as one safetensors object of ``nbytes``; ``parts`` computes the digests.

    Layers that are on the CPU, contiguous and stored unchanged, are not copied.

    kv: a chunk of valid form. check: checks its numbers, unless that was done; ``parts`` calls it,
    and raises its errors. written_at: when the chunk was first stored, a Unix time, to be kept in
    the object; None keeps none. Raises ValueError for a dtype that is not stored.
    """

    def __init__(
        self,
        key: KVKey,
        kv: StoredKV,
        mac: Mac = CHECKSUM,
        *,
        check: Callable[[], None] = lambda: None,
        written_at: float | None = None,
    ) -> None:
        if kv.dtype not in DTYPE_NAMES:
            known = ", ".join(map(str, DTYPE_NAMES))
            raise ValueError(f"dtype {kv.dtype} is none of {known}")
        kv = kv if isinstance(kv, PackedKV) else packed(kv, kv.precision)
        own = [] if kv.prior is None else [_bytes_of(kv.prior.detach().cpu().contiguous())]
        self._layers = _layers_of(kv)
        if isinstance(kv, PackedKV):
            own.append(_bytes_of(kv.exponents.cpu().contiguous()))
        self._own, self._spans, self._mac, self._check = own, spans_of(kv), mac, check
        self._metadata = {
            "format": FORMAT,
            "key": str(key),
            "fingerprint": key.fingerprint,
            "position": str(kv.position),
            "tokens": str(kv.tokens),
            "precision": precision_text(kv),
            "mac": mac.name,
            **({} if written_at is None else {"written": f"{max(written_at, 0):.6f}"}),
        }
        self._body = [*own, *(part for parts in self._layers for part in parts)]
        blank = "0" * DIGEST_DIGITS
        head = self._header(blank * len(self._layers), blank)
        self.nbytes = len(head) + sum(part.nbytes for part in self._body)

    def parts(self) -> Parts:
        """Return all of it, in order, after checking the numbers."""
        self._check()
        layers = "".join(self._mac.digest(*parts) for parts in self._layers)
        metadata = {**self._metadata, "layers": layers}
        head = head_digest(self._mac, metadata, self._spans, *self._own)
        return [self._header(layers, head), *self._body]

    def _header(self, layers: str, head: str) -> bytes:
        return header_bytes({**self._metadata, "layers": layers, "head": head}, self._spans)


def read_head(
    read: Callable[[int, int], Tensor], nbytes: int, key: KVKey, mac: Mac = CHECKSUM
) -> Head:
    """Read and check the head of an object of ``nbytes``.

    read: returns the object's bytes from start to end, (end - start,) uint8. Nothing is asked for
    that the object does not have or that is beyond a head's limits. Raises DamagedChunkError,
    BadSignatureError, ForeignChunkError when it is another key's or format's, and what ``read``
    raises.
    """
    first = read(0, min(nbytes, HEAD_BYTES))
    start = body_start(first, nbytes)
    if start > first.numel():
        first = read(0, start)
    header = parse_header(bytes(first[PREFIX_BYTES:start].numpy()), start, nbytes - start)
    check_mac(header.metadata, mac)
    check_shapes(header.metadata, header.spans)
    own: dict[str, Tensor] = {}
    for name, span in header.spans.items():
        if name != "kv":
            begin, end = start + span.start, start + span.end
            raw = first[begin:end] if end <= first.numel() else read(begin, end)
            # not a view: it would hold on to what it lies in
            own[name] = raw.clone().view(STORED_DTYPES[span.dtype]).view(span.shape)
    return _checked_head(header, own, nbytes, key, mac)


def _layers_of(kv: StoredKV) -> list[list[memoryview]]:
    """Return each layer's bytes: one part if keys and values are adjacent in memory, else two."""
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


def _checked_head(
    header: ChunkHeader, own: Mapping[str, Tensor], nbytes: int, key: KVKey, mac: Mac
) -> Head:
    metadata, span = header.metadata, header.spans["kv"]
    tensors = [_bytes_of(own[name]) for name in ("prior", "scales") if name in own]
    if head_digest(mac, metadata, header.spans, *tensors) != metadata["head"]:
        if mac.by_key:
            raise BadSignatureError("was written with another key, or is damaged")
        raise DamagedChunkError("checksum of the head does not match")
    if metadata["key"] != str(key):
        raise ForeignChunkError(f"holds {metadata['key']}, not {key}")
    prior = own.get("prior")
    if prior is not None and not prior.isfinite().all():
        raise DamagedChunkError(NOT_FINITE)
    if "scales" in own and not are_written(own["scales"]):
        raise DamagedChunkError("scales are out of the range that this version writes")
    layers, _, kv_heads, tokens, head_dim = span.shape
    precision, dtype = precision_of(metadata, span.dtype)
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
        checksums=tuple(re.findall(f".{{{DIGEST_DIGITS}}}", metadata["layers"])),
        precision=precision,
        scales=own.get("scales"),
        mac=mac,
        written_at=float(metadata["written"]) if mac.by_key and "written" in metadata else None,
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
