"""The model around a worker's attention layers, and its decoder layers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import nn

from cacheblend_rag.errors import UnsupportedModelError


def model_with(name: str, attention: nn.Module) -> Any:
    """Find the model of an attention layer: vLLM gives a connector the layers, not the model."""
    for found in gc.get_objects():
        # Asked of the type: lazy modules import themselves when an instance is asked.
        if issubclass(type(found), nn.Module) and hasattr(found, "embed_input_ids"):
            try:
                if found.get_submodule(name) is attention:
                    return found
            except AttributeError:
                continue
    raise UnsupportedModelError("the model around the attention layers was not found")


def decoder_layers(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the decoder layers that attention layers of these names belong to, in order."""
    parts = names[0].split(".")
    for count in range(1, len(parts)):
        listed = ".".join(parts[:count])
        if isinstance(layers := model.get_submodule(listed), nn.ModuleList):
            break
    else:
        raise UnsupportedModelError(f"{names[0]} is in no list of decoder layers")
    found = [name.removeprefix(f"{listed}.").partition(".")[0] for name in names]
    if len(set(found)) != len(found):
        raise UnsupportedModelError("a decoder layer holds several attention layers")
    if len(found) != len(layers):
        raise UnsupportedModelError("some decoder layers have no attention")
    return [model.get_submodule(f"{listed}.{index}") for index in found]
