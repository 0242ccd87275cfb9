"""Finds the active adapters (LoRA and the like) of a model, and hashes them.

PEFT is not imported. A layer with PEFT adapters is recognized by its attributes: it lists its
containers of adapters (``adapter_layer_names``), which adapters are active, which are
merged into its weights, and whether all are disabled. A container holds each adapter's parts under
the adapter's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cacheblend_rag.engines.identity import weights_hash

INNER_NAMES = ("base_layer", "original_module")
"""Under which PEFT's layers keep the module that they were put around."""
PLAIN = (bool, int, float, str)


def has_adapters(kind: type[nn.Module]) -> bool:
    """Whether modules of a class are layers with adapters."""
    return getattr(kind, "adapter_layer_names", None) is not None


def merged_into(layer: Any) -> tuple[str, ...]:
    """Return the adapters that are merged into a layer's weights."""
    return tuple(layer.merged_adapters)


def in_effect(layer: Any) -> tuple[str, ...]:
    """Return the adapters that a layer applies, in order; merged ones are applied by its weights.

    A layer whose adapters are disabled takes merged ones out of its weights when it is next run.
    """
    if layer.disable_adapters:
        return ()
    active = layer.active_adapters
    names = merged_into(layer) or ([active] if isinstance(active, str) else active)
    return tuple(dict.fromkeys(names))


def settings(layer: nn.Module, adapter: str) -> dict[str, Any]:
    """Return a layer's settings of an adapter, such as its scaling, by name."""
    return {
        name: value[adapter] if isinstance(value[adapter], PLAIN) else type(value[adapter]).__name__
        for name, value in vars(layer).items()
        if type(value) is dict and adapter in value
    }


def main_settings(layer: Any, adapter: str) -> tuple[Any, ...]:
    """Return an adapter's name and those of its settings that the layer itself names as such."""
    own = vars(layer)
    kept = [own.get(name) for name in layer.other_param_names]
    return adapter, *(
        value[adapter]
        for value in kept
        if type(value) is dict and isinstance(value.get(adapter), PLAIN)
    )


def own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and persistent buffers by name, shared ones once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def base_weights_hash(model: nn.Module, dtype: torch.dtype) -> str:
    """Return a hash of a model's weights without adapters: that of the model before it got any."""
    layers = _adapter_layers(model)
    weights = (
        (_without_wrappers(name, layers), weight)
        for name, weight in own_tensors(model)
        if _container(name, layers) is None
    )
    return weights_hash(weights, dtype)


def adapters_hash(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Return a hash of the active adapters' weights and settings, not names; None if none."""
    layers = _adapter_layers(model)
    effective = {name: in_effect(layer) for name, layer in layers.items()}
    places: dict[str, Any] = {}
    for name, adapters in effective.items():
        for index, adapter in enumerate(adapters):
            places[f"{name}.{index}"] = settings(layers[name], adapter)
    weights = []
    for name, weight in own_tensors(model):
        if (found := _container(name, layers)) is None:
            continue
        layer, kind, adapter, rest = found
        if adapter in effective[layer]:
            weights.append((f"{layer}.{kind}.{effective[layer].index(adapter)}.{rest}", weight))
    if not weights:
        return None
    return f"{weights_hash(weights, dtype)} {json.dumps(places, sort_keys=True)}"


def _adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if has_adapters(type(module))}


def _container(name: str, layers: Mapping[str, nn.Module]) -> tuple[str, str, str, str] | None:
    """Say to which adapter a weight belongs: layer, kind of weight, adapter, the rest of its name.

    None for a weight that is no adapter's.
    """
    for layer in _prefixes(name):
        if layer not in layers:
            continue
        kind, _, inside = name[len(layer) + 1 :].partition(".")
        if inside and hasattr(getattr(layers[layer], kind), "keys"):
            adapter, _, rest = inside.partition(".")
            return layer, kind, adapter, rest
    return None


def _without_wrappers(name: str, layers: Mapping[str, nn.Module]) -> str:
    """Return the name that a weight had before layers were put around its module."""
    for layer in _prefixes(name):
        inner = name[len(layer) + 1 :]
        if layer in layers and inner.partition(".")[0] in INNER_NAMES:
            return _without_wrappers(f"{layer}.{inner.partition('.')[2]}", layers)
    return name


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules that a weight lies in, the outermost first."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])
