"""Reads a GGUF file's metadata and tensor table, without its weights.

The file is not trusted, and the libraries that convert it believe its numbers. So each count and
length is held against the bytes that follow before anything is read or allocated.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cacheblend_rag.errors import first_line

ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Roles of special tokens, of each of which a file may give the id, and transformers' names."""
MOST_LETTERS = 1024
"""Characters of a token; the longest of known vocabularies, runs of spaces, have a few hundred."""
MOST_BYTES = 1 << 28
MOST_ITEMS = 1 << 22
"""Of all arrays and tables of a header; large vocabularies have a million tokens and merges."""
MOST_DIMENSIONS = 4
WINDOW = "context_length"
"""The end of settings that may be larger than any tensor is wide."""
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The formats of numbers in ``struct``, by GGUF's number of their type."""
STRING, ARRAY = 8, 9
LEAST_ITEM = 8
"""Bytes of an empty string, with which a pair of metadata and a tensor's description begin."""


class CannotConvertError(Exception):
    """A GGUF file cannot be converted; the message says why and what to do, but not which file."""

    def __init__(self, why: str, advice: str = "give the model's folder in hub format instead"):
        super().__init__(f"{why}: {advice}")


class Tensor(NamedTuple):
    """A line of the tensor table. place: of its first byte in the file."""

    shape: tuple[int, ...]
    kind: str
    place: int
    nbytes: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file. metadata: values by key. tensors: by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp."""
        return str(self.metadata["general.architecture"])

    @property
    def settings(self) -> dict[str, Any]:
        """The architecture's settings, by key without the architecture's name."""
        start = f"{self.architecture}."
        return {
            key.removeprefix(start): value
            for key, value in self.metadata.items()
            if key.startswith(start)
        }

    def tokenizer(self, key: str, default: Any = None) -> Any:
        """Return a tokenizer setting."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def read_header(file: Path) -> GgufHeader:
    """Read a GGUF file's header.

    Raises CannotConvertError when the file is damaged, is a part of a split file, holds no
    tokenizer, or has counts from which transformers would make what no file holds.
    """
    try:
        with file.open("rb") as opened:
            header = _read(_Values(opened))
    except (ValueError, KeyError, OSError) as error:
        raise CannotConvertError(
            f"the GGUF file is damaged or incomplete ({first_line(error)})", "fetch it again"
        ) from error
    if header.metadata.get("split.count", 0) > 1:
        raise CannotConvertError(
            f"the file is one of {header.metadata['split.count']} parts of a split GGUF",
            "join them first (llama-gguf-split --merge)",
        )
    _check_tokens(header)
    _check_counts(header)
    return header


class _Values:
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

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def count(self, least: int = LEAST_ITEM) -> int:
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
            return [self.text() for _ in range(self.count())]
        return list(self.numbers(FORMS[kind], self.count(struct.calcsize(FORMS[kind]))))


def _read(data: _Values) -> GgufHeader:
    data.take(4)  # the magic bytes
    if (version := data.number("I")) not in {2, 3}:
        raise ValueError(f"its version {version} is neither 2 nor 3")
    count, pairs = data.count(), data.count()
    metadata = {data.text(): data.value() for _ in range(pairs)}
    table = [_tensor(data) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-data.place // alignment) * alignment  # of the weights
    tensors = {name: one._replace(place=start + one.place) for name, one in table}
    if (len(metadata), len(tensors)) != (pairs, count):
        raise ValueError("a name comes twice")
    for name, one in tensors.items():
        if one.place + one.nbytes > data.size:
            raise ValueError(f"the tensor {name!r} ends beyond the file's {data.size} bytes")
    if sum(one.nbytes for one in tensors.values()) > data.size - start:
        raise ValueError("tensors overlap")
    return GgufHeader(metadata, tensors)


def _tensor(data: _Values) -> tuple[str, Tensor]:
    """Read a tensor's name and description; its place counts from the first of all weights."""
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
    return name, Tensor(shape, str(kind.name), data.number("Q"), nbytes)


def _check_tokens(header: GgufHeader) -> None:
    tokens = header.tokenizer("tokens")
    is_none = header.tokenizer("model") in {None, "none", "no_vocab"}
    if is_none or not tokens or not isinstance(tokens, list):
        raise CannotConvertError("the GGUF file holds no tokenizer")
    for role in ROLES:
        number = header.tokenizer(f"{role}_token_id", 0)
        if not (isinstance(number, int) and 0 <= number < len(tokens)):
            raise CannotConvertError(
                f"its {role} token is number {number}, but it lists {len(tokens)} tokens"
            )
    if longest := max(tokens, key=len)[MOST_LETTERS:]:
        raise CannotConvertError(f"a token has {MOST_LETTERS + len(longest)} characters")


def _check_counts(header: GgufHeader) -> None:
    """Refuse settings from which transformers would make layers or weights that no file holds."""
    widest = max(max(one.shape, default=1) for one in header.tensors.values())
    for key, value in header.settings.items():
        most = len(header.tensors) if key == "block_count" else widest
        numbers = value if isinstance(value, list) else [value]
        if not key.endswith(WINDOW) and any(isinstance(n, int) and n > most for n in numbers):
            raise CannotConvertError(
                f"{header.architecture}.{key}={value!r} does not fit its tensors"
            )
