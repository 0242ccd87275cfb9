"""The weights that a model computes with, adapters (LoRA and the like) included.

PEFT is not imported. A layer with PEFT's adapters is recognized by its attributes: it names its
containers of adapters (``adapter_layer_names``), which adapters are active, which are merged into
its weights, and whether all are disabled. A container holds each adapter's parts under the
adapter's name.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from cacheblend_rag.engines.identity import weights_hash

INNER_NAMES = ("base_layer", "original_module")
"""Under which PEFT's layers keep the module that they were put around."""
PLAIN = (bool, int, float, str)


@dataclass(frozen=True, eq=False)
class ModelState:
    """What shows that a model's weights or adapters have changed.

    tensors: its weights. stamps: its modules, each weight's version counter and address, and the
    adapters merged into each layer. adapters: the active ones, with their settings, by layer.
    """

    tensors: tuple[ReferenceType[Tensor], ...]
    stamps: tuple[Hashable, ...]
    adapters: tuple[Hashable, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Look at a model: about a microsecond for each module and weight."""
        modules, tensors = _all_parts(model)
        adapted = {kind for kind in set(map(type, modules)) if _has_adapters(kind)}
        layers: list[Any] = [one for one in modules if type(one) in adapted] if adapted else []
        merged = [tuple(layer.merged_adapters) for layer in layers]
        active = [
            tuple((name, *_settings(layer, name).items()) for name in _active(layer))
            for layer in layers
        ]
        stamps = (*map(id, modules), *map(_stamp, tensors), *merged)
        return cls(tuple(map(ref, tensors)), stamps, tuple(active))

    def has_weights_of(self, other: ModelState) -> bool:
        """Whether modules and weights are those of another state; active adapters may differ."""
        return self.stamps == other.stamps and all(map(is_, self.tensors, other.tensors))


def _all_parts(model: nn.Module) -> tuple[list[nn.Module], list[Tensor]]:
    """Return a model's modules, and their weights; each request asks, so it must be quick."""
    modules, tensors = [model], list[Tensor]()
    for module in modules:  # which grows meanwhile
        if module._modules:
            modules += [child for child in module._modules.values() if child is not None]
        if module._parameters or module._buffers:
            tensors += [weight for _, weight in _own(module)]
    return modules, tensors


def _stamp(tensor: Tensor) -> Hashable:
    """Return what changes when a tensor is written to, or is laid elsewhere."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # an inference tensor counts no writes, a wrapper has no storage
        return None


def hash_in_memory(model: nn.Module, dtype: torch.dtype) -> str:
    """Return a hash of the weights in effect; without adapters, that of the model's own files.

    Active adapters count by weights, settings and order, not by name; others do not count. dtype:
    that of the values.
    """
    hashed = weights_hash(_in_effect(model, "", set()), dtype)
    adapters = {
        name: [found for one in _active(layer) if (found := _settings(layer, one))]
        for name, layer in model.named_modules()
        if _has_adapters(type(layer))
    }
    settings = {name: found for name, found in adapters.items() if found}
    return f"{hashed} {json.dumps(settings, sort_keys=True)}" if settings else hashed


def _in_effect(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names that they have in the model without adapters, each weight once.

    Active adapters' weights follow by their layer and their place in the order of application.
    """
    for name, weight in _own(module):
        if id(weight) not in seen:
            seen.add(id(weight))
            yield prefix + name, weight
    is_adapted = _has_adapters(type(module))
    children: dict[str, Any] = dict(module.named_children())
    for name, child in children.items():
        if is_adapted and hasattr(child, "keys"):
            for place, adapter in enumerate(one for one in _active(module) if one in child):
                yield from _part(child[adapter], f"{prefix}{name}.{place}.", seen)
        else:
            is_inner = is_adapted and name in INNER_NAMES
            yield from _in_effect(child, prefix if is_inner else f"{prefix}{name}.", seen)


def _part(part: Tensor | nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    return iter([(prefix, part)]) if isinstance(part, Tensor) else _in_effect(part, prefix, seen)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters and persistent buffers, without those of modules in it."""
    for name, weight in (*module._parameters.items(), *module._buffers.items()):
        if weight is not None and name not in module._non_persistent_buffers_set:
            yield name, weight


def _has_adapters(kind: type[nn.Module]) -> bool:
    return getattr(kind, "adapter_layer_names", None) is not None


def _active(layer: Any) -> tuple[str, ...]:
    """Return the adapters that a layer applies, in order; merged ones are applied by its weights.

    A layer whose adapters are disabled takes merged ones out of its weights when it is next run.
    """
    if layer.disable_adapters:
        return ()
    active = layer.active_adapters
    names = layer.merged_adapters or ([active] if isinstance(active, str) else active)
    return tuple(dict.fromkeys(names))


def _settings(layer: nn.Module, adapter: str) -> dict[str, bool | int | float | str]:
    """Return a layer's settings of an adapter, such as its scaling, by name."""
    return {
        name: value[adapter] if isinstance(value[adapter], PLAIN) else type(value[adapter]).__name__
        for name, value in vars(layer).items()
        if type(value) is dict and adapter in value
    }
