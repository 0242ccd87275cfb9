"""Detects changes of a model cheaply, without reading weights.

It compares the modules and weights (identity of tensors, their storage, and PyTorch's version
counters) and the active adapters. Writes through ``tensor.data`` into the same storage or to
packed weights, and effects of forward hooks, are not noticed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import is_
from weakref import ReferenceType, ref

from torch import Tensor, nn

from cacheblend_rag.engines.transformers.adapters import (
    has_adapters,
    in_effect,
    main_settings,
    merged_into,
)


@dataclass(frozen=True, eq=False)
class ModelState:
    """A snapshot of a model.

    tensors: its weights. stamps: its modules, each weight's version counter and storage, and
    the adapters merged into each layer. adapters: the active ones, with their settings, by layer.
    """

    tensors: tuple[ReferenceType[Tensor], ...]
    stamps: tuple[Hashable, ...]
    adapters: tuple[Hashable, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Look at a model: about half a microsecond for each module and weight."""
        modules, tensors = _parts(model)
        stamps: list[Hashable] = [len(modules), *map(id, modules), *_stamps(tensors)]
        adapters: list[Hashable] = []
        # Modules are many, their classes few.
        adapted = {kind for kind in set(map(type, modules)) if has_adapters(kind)}
        for layer in [module for module in modules if type(module) in adapted] if adapted else ():
            stamps.append(merged_into(layer))
            adapters.append(tuple(main_settings(layer, name) for name in in_effect(layer)))
        return cls(tuple(map(ref, tensors)), tuple(stamps), tuple(adapters))

    def has_weights_of(self, other: ModelState) -> bool:
        """Whether modules and weights are those of another state; adapters in effect may differ."""
        return self.stamps == other.stamps and all(map(is_, self.tensors, other.tensors))


def _parts(model: nn.Module) -> tuple[list[nn.Module], list[Tensor]]:
    """Return a model's modules, and their parameters and persistent buffers.

    Weights that are elsewhere (``meta``) are left out: they are other objects after each use.
    """
    modules = [model]
    found: list[Tensor | None] = []
    for module in modules:  # which grows meanwhile
        if children := module._modules:
            modules += [child for child in children.values() if child is not None]
        if parameters := module._parameters:
            found += parameters.values()
        if buffers := module._buffers:
            transient = module._non_persistent_buffers_set
            found += [buffer for name, buffer in buffers.items() if name not in transient]
    return modules, [tensor for tensor in found if tensor is not None and not tensor.is_meta]


def _stamps(tensors: list[Tensor]) -> list[Hashable]:
    try:
        return [*[tensor._version for tensor in tensors], *[one.data_ptr() for one in tensors]]
    except RuntimeError:  # one has no such number
        return [*map(_stamp, tensors)]


def _stamp(tensor: Tensor) -> Hashable:
    """Return what changes when a tensor is written to, or is laid elsewhere."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # an inference tensor counts no writes, a wrapper has no storage
        return None
