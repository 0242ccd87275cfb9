"""Reads a GGUF file's metadata and tensor table, without its weights.

The file is not trusted, and the libraries that convert it believe its numbers. So each count and
length is held against the bytes that follow before anything is read or allocated.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cacheblend_rag.errors import first_line

HUB_FORMAT = "give the model's folder in hub format instead"
ROLES = ("bos", "eos", "unknown", "padding")
"""Roles of special tokens; a file may give the token id of each."""
WIDTHS = (
    *("embedding_length", "feed_forward_length", "expert_feed_forward_length", "vocab_size"),
    *("expert_shared_feed_forward_length", "expert_count", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
)
"""Settings that are at most as large as the largest dimension of a tensor."""


class CannotConvertError(Exception):
    """A GGUF file cannot be converted; the message says why and what to do, but not which file."""


class Tensor(NamedTuple):
    """A line of the tensor table. offset: of its first byte after the header."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    metadata: values by key. tensors: by name. rope_factors: divisors of the rotary frequencies, one
    per pair of components; empty without any.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    rope_factors: tuple[float, ...] = ()

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp."""
        return str(self.metadata["general.architecture"])

    @property
    def types(self) -> set[str]:
        """Names of the tensors' types."""
        return {one.kind for one in self.tensors.values()}

    @property
    def tokens(self) -> Sequence[str]:
        """The vocabulary, by id."""
        found = self.tokenizer("tokens")
        return found if isinstance(found, list) else []

    def settings(self) -> dict[str, Any]:
        """Return the architecture's settings, by key without the architecture's name."""
        start = f"{self.architecture}."
        return {
            key.removeprefix(start): value
            for key, value in self.metadata.items()
            if key.startswith(start)
        }

    def tokenizer(self, key: str, default: Any = None) -> Any:
        """Return a tokenizer setting."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def special_token(self, role: str) -> int | None:
        """Return the id of the token with a role (``bos``); None if no token has it."""
        number = self.tokenizer(f"{role}_token_id")
        return number if isinstance(number, int) and 0 <= number < len(self.tokens) else None


ROPE_FACTORS = "rope_freqs.weight"
MOST_FACTORS = 1024
MOST_LETTERS = 1024
"""Characters of a token; the longest of known vocabularies, runs of spaces, have a few hundred."""
MOST_BYTES = 1 << 28
MOST_ITEMS = 1 << 22
"""Of all arrays and tables of a header; large vocabularies have a million tokens and merges."""
MOST_DIMENSIONS = 4
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The formats of numbers in ``struct``, by GGUF's number of their type."""
STRING, ARRAY = 8, 9
LEAST_STRING, LEAST_PAIR, LEAST_TENSOR = 8, 13, 24
"""Bytes of an empty string, of a pair of metadata and of a tensor's description without names."""


def read_header(file: Path) -> GgufHeader:
    """Read a GGUF file's header.

    Raises CannotConvertError when the file is damaged, is a part of a split file, or holds no
    weights or no tokenizer.
    """
    try:
        with file.open("rb") as opened:
            header = _read(_Bytes(opened))
    except (ValueError, KeyError, OSError) as error:
        raise CannotConvertError(
            f"the GGUF file is damaged or incomplete ({first_line(error)}): fetch it again"
        ) from error
    _check(header)
    return header


class _Bytes:
    """Reads the values of a header in order; raises ValueError for what the file cannot hold."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._items = file, 0
        self.place, self.size = 0, os.fstat(file.fileno()).st_size

    def take(self, nbytes: int) -> bytes:
        left = min(self.size, MOST_BYTES) - self.place
        if nbytes > left:
            raise ValueError(f"{nbytes} bytes are announced at byte {self.place}, {left} follow")
        self.place += nbytes
        return self._file.read(nbytes)

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}")))

    def floats(self, place: int, count: int) -> tuple[float, ...]:
        """Read numbers of a tensor."""
        self._file.seek(place)
        return struct.unpack(f"<{count}f", self._file.read(4 * count))

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def count(self, least: int) -> int:
        """Read how many items follow, each of at least ``least`` bytes."""
        count: int = self.number("Q")
        self._items += count
        if count * least > self.size - self.place or self._items > MOST_ITEMS:
            raise ValueError(f"{count} items are announced at byte {self.place} of {self.size}")
        return count

    def value(self) -> Any:
        """Read a value of metadata: a number, a string, or a list of either."""
        if (kind := self.number("I")) != ARRAY:
            return self.text() if kind == STRING else self.number(FORMS[kind])
        if (kind := self.number("I")) == STRING:
            return [self.text() for _ in range(self.count(LEAST_STRING))]
        return list(self.numbers(FORMS[kind], self.count(struct.calcsize(FORMS[kind]))))


def _read(data: _Bytes) -> GgufHeader:
    data.take(4)  # the magic bytes
    if (version := data.number("I")) not in {2, 3}:
        raise ValueError(f"its version {version} is neither 2 nor 3")
    count, pairs = data.count(LEAST_TENSOR), data.count(LEAST_PAIR)
    metadata = {data.text(): data.value() for _ in range(pairs)}
    tensors = {one.name: one for one in (_tensor(data) for _ in range(count))}
    if (len(metadata), len(tensors)) != (pairs, count):
        raise ValueError("a name comes twice")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} is no power of 2")
    start = -(-data.place // alignment) * alignment  # of the weights
    for one in tensors.values():
        if start + one.offset + one.nbytes > data.size:
            raise ValueError(f"the tensor {one.name!r} ends beyond the file's {data.size} bytes")
    if sum(one.nbytes for one in tensors.values()) > data.size - start:
        raise ValueError("tensors overlap")
    if (held := tensors.get(ROPE_FACTORS)) is None:
        return GgufHeader(metadata, tensors)
    if held.kind != "F32" or math.prod(held.shape) > MOST_FACTORS:
        raise ValueError(f"the tensor {ROPE_FACTORS!r} has the shape {held.shape}")
    return GgufHeader(metadata, tensors, data.floats(start + held.offset, math.prod(held.shape)))


def _tensor(data: _Bytes) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, dimensions = data.text(), data.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
    shape = data.numbers("Q", dimensions)
    kind = GGMLQuantizationType(data.number("I"))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or math.prod(shape[:1]) % block:
        raise ValueError(f"the tensor {name!r} has the shape {shape}")
    nbytes = math.prod(shape) // block * block_bytes
    return Tensor(name, shape, str(kind.name), data.number("Q"), nbytes)


def _check(header: GgufHeader) -> None:
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CannotConvertError(
            f"the file is one of {parts} parts of a split GGUF: join them first (llama-gguf-split "
            "--merge)"
        )
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise CannotConvertError(f"the GGUF file names no architecture: {HUB_FORMAT}")
    if not header.tensors:
        raise CannotConvertError(f"the GGUF file holds no weights: {HUB_FORMAT}")
    if not header.tokens or header.tokenizer("model") in {None, "none", "no_vocab"}:
        raise CannotConvertError(f"the GGUF file holds no tokenizer: {HUB_FORMAT}")
    for role in ROLES:
        named = header.tokenizer(f"{role}_token_id")
        if named is not None and header.special_token(role) is None:
            raise CannotConvertError(
                f"its {role} token is number {named}, but it lists {len(header.tokens)} tokens: "
                f"{HUB_FORMAT}"
            )
    if longest := max(header.tokens, key=len)[MOST_LETTERS:]:
        raise CannotConvertError(
            f"a token has {MOST_LETTERS + len(longest)} characters: {HUB_FORMAT}"
        )
    _check_counts(header)


def _check_counts(header: GgufHeader) -> None:
    """Refuse counts from which transformers would make layers and weights that no file holds."""
    widest = max(max(one.shape, default=1) for one in header.tensors.values())
    settings = header.settings()
    for key, most in {**dict.fromkeys(WIDTHS, widest), "block_count": len(header.tensors)}.items():
        value = settings.get(key, 0)
        for number in value if isinstance(value, list) else [value]:
            if not (isinstance(number, int) and 0 <= number <= most):
                raise CannotConvertError(
                    f"{header.architecture}.{key}={number!r} does not fit its tensors: {HUB_FORMAT}"
                )
