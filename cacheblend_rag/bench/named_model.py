"""A model by its name, for benchmarks on its own weights; of its config, what they need to plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from cacheblend_rag.bench.shapes import check_positions
from cacheblend_rag.engines.model_config import context_window_in, kv_shape, text_config
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.engines.transformers.given_model import GivenModel


@dataclass(frozen=True)
class NamedModel:
    """A model's own weights; it is used in place of a `ModelShape`.

    name: as for models.resolve. max_positions: its context window.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    max_positions: int

    @classmethod
    def of(cls, name: str) -> Self:
        """Return what the model's config says; weights are not read.

        Raises ModelLoadError if there is no such model.
        """
        config = text_config(name)
        return cls(name, *kv_shape(config), context_window_in(config))

    def check_prompt(self, tokens: int) -> None:
        """Raise ConfigError when a prompt of so many tokens, and one more, does not fit."""
        check_positions(tokens, self.max_positions, self.name)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the size of ``tokens`` tokens' keys and values in all layers, in bytes."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_size * dtype.itemsize

    def load(self, *, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
        """Return the model and its tokenizer, as an engine loads them.

        Raises ModelLoadError when they cannot be loaded.
        """
        given = GivenModel.of(self.name, None, str(device), dtype)
        return given.model, given.tokenizer

    def load_tokenizer(self) -> Any:
        """Return the tokenizer; raises ModelLoadError if it cannot be loaded."""
        return load_tokenizer(self.name)
