"""CompiledOps: a compiled model's own operations, for layers that are driven one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from typing import Any

from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp

COMPILED = ("layernorm", "activation", "rotary_embedding")


class CompiledOps:
    """Operations of some layers, compiled as vLLM's compiler would.

    They are norms, activations and rotary embeddings and, on a CPU, experts. In a compiled model
    these have no kernel of their own: vLLM leaves them to the compiler, which writes one. A layer
    that is driven alone would run them as they are written, operation by operation, which is slower
    and rounds differently. Where vLLM compiles nothing, nor does this.
    """

    def __init__(self, layers: Iterable[nn.Module], vllm_config: VllmConfig) -> None:
        self._made: list[list[tuple[Any, str, Callable[..., Any]]]] = []
        with set_current_vllm_config(vllm_config):
            for layer in layers:
                left = [(module, *found) for module in layer.modules() if (found := _left(module))]
                self._made.append(
                    [(module, name, _compiled(module, method)) for module, name, method in left]
                )

    @contextmanager
    def within(self, layer: int) -> Iterator[None]:
        """Have a layer use them, as long as it is driven."""
        made = self._made[layer]
        before = [getattr(module, name) for module, name, _ in made]
        for module, name, compiled in made:
            setattr(module, name, compiled)
        try:
            yield
        finally:
            for (module, name, _), method in zip(made, before, strict=True):
                setattr(module, name, method)


def _left(module: Any) -> tuple[str, Callable[..., Any]] | None:
    """Return what vLLM leaves to the compiler in a module, and the attribute it is called by."""
    if isinstance(module, CustomOp):
        kind = type(module)
        is_small = any(f".layers.{name}" in kind.__module__ for name in COMPILED)
        if is_small and not kind.enabled():
            return "_forward_method", module.forward_native
    elif isfunction(getattr(module, "_forward_entry", None)):  # else experts are one opaque op
        return "_forward_impl", module._forward_impl
    return None


def _compiled(module: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a method by vLLM's own hook, which also serves modules that are no CustomOp."""
    compiled: Callable[..., Any] = CustomOp.maybe_compile(module, method)
    return compiled
