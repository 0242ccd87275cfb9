"""One chunk's keys and values for all layers, and the key under which they are stored."""

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

from cacheblend_rag.settings import Precision, check_namespace

FORMAT_VERSION = 2
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
    """One chunk's KV.

    Args:
        keys, values: (layers, kv_heads, tokens, head_dim), finite, keys rotated at positions
            ``position .. position + tokens - 1``; each layer contiguous, same dtype, any device.
        position: position of the first token when the KV was computed (the lead-in's length).
        prior: (tokens,) float32, how much each token's KV depends on the text before the chunk in
            its document; None for a chunk that stands alone.
        precision: ``native``, or the format to which numbers were rounded before they were stored
            (see kv/precision.py).
    """

    keys: Tensor
    values: Tensor
    position: int
    prior: Tensor | None = None
    precision: Precision = "native"

    @property
    def shape(self) -> torch.Size:
        """Of keys and of values: (layers, kv_heads, tokens, head_dim)."""
        return self.keys.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and of values."""
        return self.keys.dtype

    @property
    def tokens(self) -> int:
        """Number of the chunk's tokens."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        prior = 0 if self.prior is None else self.prior.numel() * self.prior.element_size()
        return 2 * self.keys.numel() * self.keys.element_size() + prior

    def check_form(self) -> None:
        """Check shapes and dtypes, without reading the numbers.

        Raises:
            ValueError: when they differ from the class's description.
        """
        keys, values, prior = self.keys, self.values, self.prior
        if keys.dim() != 4 or 0 in keys.shape or not keys.is_floating_point():
            raise ValueError(
                f"keys are {keys.dtype} {tuple(keys.shape)}, "
                "want float (layers, kv_heads, tokens, head_dim), none of them 0"
            )
        if values.shape != keys.shape or values.dtype != keys.dtype:
            raise ValueError(
                f"values are {values.dtype} {tuple(values.shape)}, "
                f"keys are {keys.dtype} {tuple(keys.shape)}"
            )
        if prior is not None and (prior.shape != (self.tokens,) or prior.dtype != torch.float32):
            raise ValueError(
                f"prior is {prior.dtype} {tuple(prior.shape)}, want float32 ({self.tokens},)"
            )
        if self.position < 0:
            raise ValueError(f"position={self.position} must be at least 0")

    def check_numbers(self) -> None:
        """Check only the numbers, which takes a fifth of the time of writing them to a file.

        Raises:
            NotFiniteError: when one is NaN or infinite.
        """
        prior = () if self.prior is None else (self.prior[None],)
        for part in (self.keys, self.values, *prior):
            # Layer by layer, since only a layer is sure to be contiguous: ten times as fast.
            if not all(map(is_finite, part)):
                raise NotFiniteError("holds NaN or infinity")

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values, each (kv_heads, tokens, head_dim), not copied."""
        return self.keys[index], self.values[index]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ChunkKV:
        """Return the same chunk KV with each of its tensors as ``change`` returns it."""
        prior = None if self.prior is None else change(self.prior)
        return replace(self, keys=change(self.keys), values=change(self.values), prior=prior)


class NotFiniteError(ValueError):
    """Numbers of a chunk KV are NaN or infinite."""


class NumbersCheck:
    """A check of a chunk's numbers, run once, by the first tier that needs it."""

    def __init__(self, kv: ChunkKV) -> None:
        self._unchecked: ChunkKV | None = kv

    def __call__(self) -> None:
        """Raise NotFiniteError when one is NaN or infinite."""
        if self._unchecked is not None:
            self._unchecked.check_numbers()
            self._unchecked = None


def is_finite(tensor: Tensor) -> bool:
    """Whether a contiguous tensor of floats holds neither NaN nor infinity.

    Either makes the sum NaN or infinite, which is twice as fast as testing each number. A sum may
    also overflow; then minimum and maximum decide: NaN makes both NaN, infinity is one of them.
    """
    return math.isfinite(tensor.sum()) or all(map(math.isfinite, tensor.aminmax()))
