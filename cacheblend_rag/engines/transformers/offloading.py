"""Reads weights of models that accelerate has offloaded to host memory or disk.

An offloaded module's parameters are on PyTorch's ``meta`` device, without values; a hook around its
forward loads them, runs it, and frees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cacheblend_rag.errors import ConfigError


def own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and persistent buffers by name, shared ones once.

    Those that are elsewhere are loaded for as long as the caller looks at them. Raises ConfigError
    for weights without values that nothing loads.
    """
    yield from _tensors_below(model, "", set())


def run_device(model: nn.Module) -> torch.device:
    """Return where a model takes its inputs; weights that are elsewhere (``meta``) do not tell."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    for module in model.modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device("cpu")


def _tensors_below(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    with _loaded(module):
        for name, tensor in direct_tensors(module):
            if tensor.is_meta:
                raise ConfigError(f"model has no values for its weight {prefix}{name}")
            if id(tensor) not in seen:
                yield prefix + name, tensor
        for name, child in module._modules.items():
            if child is not None:
                yield from _tensors_below(child, f"{prefix}{name}.", seen)
    # What was loaded is gone by now, and its id may be given to another tensor.
    seen.update(id(tensor) for _, tensor in direct_tensors(module) if not tensor.is_meta)


def direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of a module itself."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


@contextmanager
def _loaded(module: nn.Module) -> Iterator[None]:
    """Have a module's hook, if it has one, load what is elsewhere, as if it were run."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None or not any(parameter.is_meta for parameter in module.parameters()):
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)
