"""ChunkKV: one chunk's keys and values for all layers; KVKey: the name it is stored under."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORMAT_VERSION = 1


def chunk_id(token_ids: Sequence[int]) -> str:
    """Return the chunk id: a 128-bit hash (32 hex digits) of the chunk's token ids."""
    return hashlib.blake2b(_int_bytes(token_ids), digest_size=16).hexdigest()


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return a 64-bit hash (16 hex digits) of what makes KV interchangeable.

    parts: model, revision, weights dtype, tokenizer, rope, lead-in, TP rank and size, namespace:
    any JSON values. The format version is added here.
    """
    text = json.dumps({**parts, "format": FORMAT_VERSION}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _int_bytes(token_ids: Sequence[int]) -> bytes:
    return b"".join(int(i).to_bytes(4, "little") for i in token_ids)


@dataclass(frozen=True, slots=True)
class KVKey:
    """The name of one chunk KV in a store.

    chunk_id: hash of the chunk's token ids.
    fingerprint: hash of model, tokenizer, rope, lead-in, namespace, format.
    context_id: chunk_id() of the document tokens the chunk was computed behind; "" without.
    """

    chunk_id: str
    fingerprint: str
    context_id: str = ""

    def __str__(self) -> str:
        tail = f"-{self.context_id}" if self.context_id else ""
        return f"{self.fingerprint}-{self.chunk_id}{tail}"

    @classmethod
    def parse(cls, text: str) -> KVKey:
        """Read back what ``str(key)`` wrote; raises ValueError on anything else."""
        parts = text.split("-")
        widths = [16, 32, 32][: len(parts)]
        if len(parts) not in (2, 3) or [len(p) for p in parts] != widths:
            raise ValueError(f"{text!r} is no KV key")
        if any(c not in "0123456789abcdef" for p in parts for c in p):
            raise ValueError(f"{text!r} is no KV key")
        return cls(parts[1], parts[0], parts[2] if len(parts) == 3 else "")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """One chunk's KV.

    keys, values: (layers, kv_heads, tokens, head_dim), keys rotated at positions
        ``position .. position + tokens - 1``; contiguous, same dtype, any device.
    position: position of the first token when the KV was computed (the lead-in's length).
    prior: (tokens,) float32, how much each token's KV depends on what precedes the chunk, or None.
    """

    keys: Tensor
    values: Tensor
    position: int
    prior: Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        prior = 0 if self.prior is None else self.prior.numel() * self.prior.element_size()
        return 2 * self.keys.numel() * self.keys.element_size() + prior

    def to(self, device: torch.device | str) -> ChunkKV:
        """Return the same chunk KV with its tensors on ``device``."""
        prior = None if self.prior is None else self.prior.to(device)
        return ChunkKV(self.keys.to(device), self.values.to(device), self.position, prior)
