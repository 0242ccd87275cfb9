"""Loads a model by its name, or takes a loaded one out of its wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.engines.transformers.wrappers import model_in, without_compiling
from cacheblend_rag.errors import ConfigError


class GivenModel(NamedTuple):
    """A model that is ready to run, with its tokenizer and name.

    wrapper: the user's module around it, if there is one. name: what it is called. loaded_by: the
    name by which it was loaded, None if it was loaded before.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    wrapper: nn.Module | None = None
    loaded_by: str | Path | None = None

    @classmethod
    def of(
        cls,
        model: str | Path | nn.Module,
        tokenizer: Any,
        device: str | None,
        dtype: str | torch.dtype | None,
    ) -> Self:
        """Load a model by its name, or prepare a loaded one; see TransformersEngine."""
        if not isinstance(model, nn.Module):
            loaded = loading.load_model(model, loading.pick_device(device), dtype)
            return cls(loaded, tokenizer or load_tokenizer(model), str(model), loaded_by=model)
        if tokenizer is None:
            raise ConfigError("tokenizer must be given together with a loaded model")
        outer = without_compiling(model)
        inner = loading.prepare(model_in(outer))
        name = inner.config.name_or_path or inner.config.model_type
        return cls(inner, tokenizer, name, None if outer is inner else outer.eval())
