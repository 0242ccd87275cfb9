"""The KV tensors of one chunk, and ``KVKey``, the name that they are stored under."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cacheblend_rag.kv.precision import FORMATS, head_dim_of, precision_of
from cacheblend_rag.settings import Precision, check_namespace

FORMAT_VERSION = 3
NAMESPACE_DIGITS = 32

_HASH_32 = re.compile("[0-9a-f]{32}")
_FINGERPRINT = re.compile("[0-9a-f]{64}")


def chunk_id(token_ids: Sequence[int]) -> str:
    """Return the chunk id: a 128-bit hash (32 hex digits) of the chunk's token ids."""
    return hashlib.blake2b(_int_bytes(token_ids), digest_size=16).hexdigest()


def prefix_ids(token_ids: Sequence[int], ends: Sequence[int]) -> list[str]:
    """Return the chunk ids of the tokens before each of ``ends`` (increasing); "" for 0."""
    digest, done, found = hashlib.blake2b(digest_size=16), 0, []
    for end in ends:
        digest.update(_int_bytes(token_ids[done:end]))
        done = end
        found.append(digest.hexdigest() if end else "")
    return found


def fingerprint(parts: Mapping[str, Any], namespace: str = "default") -> str:
    """Return a hash (64 hex digits) of everything that KV depends on, tokens aside.

    parts: model, revision, weights dtype, tokenizer, rope, lead-in, TP rank and size: any JSON
    values. The namespace and the format version are added here. The first half depends on the
    namespace alone, so that a store can find one tenant's chunks without reading others'.
    """
    whole = {**parts, "namespace": namespace, "format": FORMAT_VERSION}
    text = json.dumps(whole, sort_keys=True, default=str)
    return namespace_id(namespace) + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def namespace_id(namespace: str) -> str:
    """Return the 32 hex digits that every fingerprint of ``namespace`` begins with.

    Raises:
        ConfigError: when it is not a text.
    """
    check_namespace(namespace)
    return hashlib.blake2b(namespace.encode(), digest_size=NAMESPACE_DIGITS // 2).hexdigest()


def _int_bytes(token_ids: Sequence[int]) -> bytes:
    return b"".join(int(i).to_bytes(4, "little") for i in token_ids)


@dataclass(frozen=True, slots=True)
class KVKey:
    """The name of one chunk KV in a store.

    Args:
        chunk_id: hash of the chunk's token ids, 32 hex digits.
        fingerprint: what ``fingerprint`` returned, 64 hex digits.
        context_id: chunk_id() of the document tokens that the chunk was computed after; "" without.

    Raises:
        ValueError: when a part is not such a hash: a key is always safe as a file name.
    """

    chunk_id: str
    fingerprint: str
    context_id: str = ""

    def __post_init__(self) -> None:
        if not _HASH_32.fullmatch(self.chunk_id):
            raise ValueError(f"chunk_id={self.chunk_id!r} must be 32 hex digits")
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            raise ValueError(f"fingerprint={self.fingerprint!r} must be 64 hex digits")
        if self.context_id and not _HASH_32.fullmatch(self.context_id):
            raise ValueError(f"context_id={self.context_id!r} must be 32 hex digits or empty")

    def __str__(self) -> str:
        tail = f"-{self.context_id}" if self.context_id else ""
        return f"{self.fingerprint}-{self.chunk_id}{tail}"

    def is_relative(self, other: KVKey) -> bool:
        """Whether ``other`` is this chunk in this namespace, for another model or lead-in."""
        return (
            other.chunk_id == self.chunk_id
            and other.fingerprint != self.fingerprint
            and other.fingerprint[:NAMESPACE_DIGITS] == self.fingerprint[:NAMESPACE_DIGITS]
        )

    @classmethod
    def parse(cls, text: str) -> KVKey:
        """Return the key that ``str(key)`` wrote.

        Raises:
            ValueError: on anything else.
        """
        parts = text.split("-")
        if len(parts) not in (2, 3) or text.endswith("-"):
            raise ValueError(f"{text!r} is no KV key")
        return cls(parts[1], parts[0], *parts[2:])

    @classmethod
    def parsed(cls, text: str) -> KVKey | None:
        """Return the key that ``str(key)`` wrote, None for anything else."""
        try:
            return cls.parse(text)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """One chunk's KV as it is computed, stored and loaded: all its layers, or some of them.

    Args:
        numbers: (layers, 2, kv_heads, tokens, head_dim), keys before values, on any device, each
            layer contiguous. Keys are rotated for positions ``position .. position + tokens - 1``,
            with precision ``int4`` all for position 0. The model's own numbers, or with ``scales``
            their quantized codes (see kv/precision.py).
        position: position of the first token when the KV was computed (the lead-in's length).
        prior: (tokens,) float32, how much each token's KV depends on the text before the chunk in
            its document; None for a chunk that stands alone.
        scales: of the codes, (layers, ...), see kv/precision.py; None for the model's own numbers.
        rounded_from: the type of the numbers that codes stand for; None for the model's own.
    """

    numbers: Tensor
    position: int
    prior: Tensor | None = None
    scales: Tensor | None = None
    rounded_from: torch.dtype | None = None

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, position: int, prior: Tensor | None = None
    ) -> ChunkKV:
        """Return the chunk of keys and values; both are copied.

        Args:
            keys: (layers, kv_heads, tokens, head_dim).
            values: as ``keys``.
            position: of the first token when they were computed.
            prior: (tokens,) float32; None is none.

        Raises:
            ValueError: when they differ in shape or type.
        """
        if values.shape != keys.shape or values.dtype != keys.dtype:
            raise ValueError(
                f"values are {values.dtype} {tuple(values.shape)}, "
                f"keys are {keys.dtype} {tuple(keys.shape)}"
            )
        return cls(torch.stack((keys, values), 1), position, prior)

    @classmethod
    def joined(cls, parts: Sequence[ChunkKV]) -> ChunkKV:
        """Return the concatenation of parts along their layers; they are copied."""
        own = [part.scales for part in parts if part.scales is not None]
        numbers = torch.cat([part.numbers for part in parts])
        return replace(parts[0], numbers=numbers, scales=torch.cat(own) if own else None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of keys and of values: (layers, kv_heads, tokens, head_dim)."""
        layers, _, kv_heads, tokens, row = self.numbers.shape
        return layers, kv_heads, tokens, head_dim_of(self.precision, row)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype of keys and values."""
        return self.rounded_from or self.numbers.dtype

    @property
    def precision(self) -> Precision:
        """``native``, unless numbers are codes."""
        return precision_of(self.numbers.dtype)

    @property
    def tokens(self) -> int:
        """Number of the chunk's tokens."""
        return int(self.numbers.shape[3])

    @property
    def keys(self) -> Tensor:
        """Keys dequantized to the model's dtype, (layers, kv_heads, tokens, head_dim).

        With precision ``int4`` every key is rotated for position 0, see ``position``.
        """
        return self.unpacked().numbers[:, 0]

    @property
    def values(self) -> Tensor:
        """Its values, as ``keys``."""
        return self.unpacked().numbers[:, 1]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that hold keys and values."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors, self.prior) if tensor is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes per token in the model's type."""
        layers, kv_heads, _, head_dim = self.shape
        return 2 * layers * kv_heads * head_dim * self.dtype.itemsize

    def part(self, first: int, last: int) -> ChunkKV:
        """Return layers ``first`` to ``last - 1``, not copied."""
        numbers = self.numbers[first:last]
        scales = None if self.scales is None else self.scales[first:last]
        return ChunkKV(numbers, self.position, self.prior, scales, self.rounded_from)

    def layer(self, index: int) -> ChunkKV:
        """Return one layer, not copied."""
        return self.part(index, index + 1)

    def cut(self, start: int, end: int) -> ChunkKV:
        """Return tokens [``start``, ``end``) as views.

        Not as copies: a copy stream would read them before they are made.

        Args:
            start: the first token.
            end: behind the last one.
        """
        prior = None if self.prior is None else self.prior[start:end]
        numbers = self.numbers[..., start:end, :]
        return replace(self, numbers=numbers, position=self.position + start, prior=prior)

    def moved(self, tensors: Sequence[Tensor]) -> ChunkKV:
        """Return this chunk KV with ``tensors``, as ``self.tensors`` on another device."""
        numbers, *scales = tensors
        return replace(self, numbers=numbers, scales=scales[0] if scales else None)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkKV:
        """Return this chunk KV with ``change`` applied to each of its tensors."""
        prior = None if self.prior is None else change(self.prior)
        return replace(self.moved([change(tensor) for tensor in self.tensors]), prior=prior)

    def packed(self, precision: Precision = "fp8") -> ChunkKV:
        """Return it quantized; itself if it is quantized already, or for ``native``.

        Args:
            precision: ``fp8`` quantizes dequantized fp8 numbers to the same codes again. ``int4``
                needs all keys rotated for position 0.

        Raises:
            ValueError: when head_dim is odd, for ``int4``.
        """
        if self.scales is not None or precision == "native":
            return self
        layers = [FORMATS[precision].pack(numbers) for numbers in self.numbers]
        codes, scales = (torch.stack(parts) for parts in zip(*layers, strict=True))
        return replace(self, numbers=codes, scales=scales, rounded_from=self.numbers.dtype)

    def unpacked(self) -> ChunkKV:
        """Return the chunk dequantized to the model's dtype; itself if it is not quantized.

        Keys of an ``int4`` chunk are still rotated for position 0 then, not for ``position``.
        """
        if self.scales is None:
            return self
        numbers = FORMATS[self.precision].unpack(self.numbers, self.scales, self.dtype)
        return ChunkKV(numbers, self.position, self.prior)

    def check_form(self) -> None:
        """Check shapes and dtypes, without reading the numbers.

        Raises:
            ValueError: when they differ from the class's description.
        """
        numbers, prior = self.numbers, self.prior
        is_shaped = numbers.dim() == 5 and numbers.shape[1] == 2 and 0 not in numbers.shape
        if not is_shaped or (self.scales is None and not numbers.is_floating_point()):
            raise ValueError(
                f"numbers are {numbers.dtype} {tuple(numbers.shape)}, "
                "want float (layers, 2, kv_heads, tokens, head_dim), none of them 0"
            )
        if prior is not None and (prior.shape != (self.tokens,) or prior.dtype != torch.float32):
            raise ValueError(
                f"prior is {prior.dtype} {tuple(prior.shape)}, want float32 ({self.tokens},)"
            )
        if self.position < 0:
            raise ValueError(f"position={self.position} must be at least 0")

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite; takes a fifth of the time of writing a file."""
        if self.prior is not None and not is_finite(self.prior):
            return False
        if self.scales is not None:
            return FORMATS[self.precision].are_finite(self.numbers, self.scales, self.dtype)
        return all(map(is_finite, self.numbers))  # only a layer is sure to be contiguous


def is_finite(tensor: Tensor) -> bool:
    """Whether a contiguous tensor of floats holds neither NaN nor infinity.

    Either makes the sum NaN or infinite, which is twice as fast as testing each number. A sum may
    also overflow; then minimum and maximum decide: NaN makes both NaN, infinity is one of them.
    """
    return math.isfinite(tensor.sum()) or all(map(math.isfinite, tensor.aminmax()))
