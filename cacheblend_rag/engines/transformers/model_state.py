"""Detects changes of a model cheaply, without reading weights.

It compares the modules and weights (identity of tensors, their storage, and PyTorch's version
counters) and the active adapters. Writes through ``tensor.data`` into the same storage, and effects
of forward hooks, are not noticed.
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
from cacheblend_rag.engines.transformers.offloading import direct_tensors


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
        """Look at a model: about a microsecond for each module and weight."""
        tensors: list[ReferenceType[Tensor]] = []
        stamps: list[Hashable] = []
        adapters: list[Hashable] = []
        waiting: list[nn.Module] = [model]
        while waiting:
            module = waiting.pop()
            stamps.append(id(module))
            waiting.extend(child for child in module._modules.values() if child is not None)
            if has_adapters(module):
                stamps.append(merged_into(module))
                adapters.append(tuple(main_settings(module, name) for name in in_effect(module)))
            if module._parameters or module._buffers:
                for _, tensor in direct_tensors(module):
                    # Weights that are elsewhere are other objects after each time they are used.
                    if not tensor.is_meta:
                        tensors.append(ref(tensor))
                        stamps.append(_stamp(tensor))
        return cls(tuple(tensors), tuple(stamps), tuple(adapters))

    def has_weights_of(self, other: ModelState) -> bool:
        """Whether modules and weights are those of another state; adapters in effect may differ."""
        return self.stamps == other.stamps and all(map(is_, self.tensors, other.tensors))


def _stamp(tensor: Tensor) -> Hashable:
    """Return what changes when a tensor is written to, or is laid elsewhere."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # an inference tensor counts no writes, a wrapper has no storage
        return None
