"""Reads a GGUF file's metadata and tensor table, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import first_line
from cacheblend_rag.models.gguf.refusal import HUB_FORMAT, CannotConvertError

TOKENIZER = "tokenizer.ggml."
ROLES = ("bos", "eos", "unknown", "padding")
"""Roles of special tokens; a file may give the token id of each."""
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    metadata: values by key; for arrays with more than LONG_ARRAY items only their length. tokens:
    the vocabulary, by id. tensors: number of values by name. types: names of the tensors' types.
    rope_factors: divisors of the rotary frequencies, one per pair of components; None without any.
    """

    metadata: Mapping[str, Any]
    tokens: tuple[str, ...]
    tensors: Mapping[str, int]
    types: frozenset[str]
    rope_factors: tuple[float, ...] | None

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp."""
        return str(self.metadata["general.architecture"])

    @property
    def quantized(self) -> bool:
        """Whether weights are quantized."""
        return not self.types <= set(FLOATS)

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
        return self.metadata.get(f"{TOKENIZER}{key}", default)

    def special_token(self, role: str) -> int | None:
        """Return the id of the token with a role (``bos``); None if no token has it."""
        number = self.tokenizer(f"{role}_token_id")
        return int(number) if number is not None and 0 <= number < len(self.tokens) else None


ROPE_FACTORS = "rope_freqs.weight"
LONG_ARRAY = 1024


def read_header(file: Path) -> Header:
    """Read a GGUF file's header.

    Raises CannotConvertError when the file is damaged, is a part of a split file, or holds no
    weights or no tokenizer.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        metadata = {
            key: len(field.data) if len(field.data) > LONG_ARRAY else field.contents()
            for key, field in reader.fields.items()
        }
        factors = [
            tuple(float(factor) for factor in tensor.data)
            for tensor in reader.tensors
            if tensor.name == ROPE_FACTORS
        ]
        header = Header(
            metadata,
            _tokens(reader),
            {str(tensor.name): int(tensor.n_elements) for tensor in reader.tensors},
            frozenset(str(tensor.tensor_type.name) for tensor in reader.tensors),
            factors[0] if factors else None,
        )
    except (ValueError, IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise CannotConvertError(
            f"the GGUF file is damaged or incomplete ({first_line(error)}): fetch it again"
        ) from error
    _check(header)
    return header


def _tokens(reader: Any) -> tuple[str, ...]:
    field = reader.fields.get(f"{TOKENIZER}tokens")
    return () if field is None else tuple(map(str, field.contents()))


def _check(header: Header) -> None:
    parts = int(header.metadata.get("split.count", 0) or 0)
    if parts > 1:
        raise CannotConvertError(
            f"the file is one of {parts} parts of a split GGUF: join them first (llama-gguf-split "
            "--merge)"
        )
    if not header.metadata.get("general.architecture"):
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
