"""The model around a worker's attention layers, and its decoder layers."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from cacheblend_rag.errors import UnsupportedModelError


def model_with(attention: Mapping[str, nn.Module]) -> tuple[Any, list[str]]:
    """Find the model of attention layers: vLLM gives a connector the layers, not the model.

    Returns:
        The model, and the layers' places in it. These are their names, except in vLLM 0.31's
        Transformers backend, which names layers by their number.
    """
    # Asked of the type: lazy modules import themselves when an instance is asked.
    models = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), nn.Module) and hasattr(found, "embed_input_ids")
    ]
    name, first = next(iter(attention.items()))
    for model in models:
        try:
            if model.get_submodule(name) is first:
                return model, list(attention)
        except AttributeError:
            continue
    for model in models:
        places = {id(module): place for place, module in model.named_modules()}
        if all(id(layer) in places for layer in attention.values()):
            return model, [places[id(layer)] for layer in attention.values()]
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
