"""Compiles a model's small operations for layers that are run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from typing import Any

from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp

from cacheblend_rag.blend.stack import replaced

COMPILED = ("layernorm", "activation", "rotary_embedding")


class CompiledOps:
    """Operations of some layers, compiled as vLLM's compiler would.

    They are norms, activations and rotary embeddings and, on a CPU, experts. In a compiled model
    vLLM leaves these to the compiler, which generates kernels. A layer that is run alone would
    execute them eagerly, which is slower and rounds differently. If vLLM does not compile, neither
    does this class.
    """

    def __init__(self, layers: Iterable[nn.Module], vllm_config: VllmConfig) -> None:
        self._made: list[list[tuple[Any, str, Callable[..., Any]]]] = []
        with set_current_vllm_config(vllm_config):
            for layer in layers:
                left = [(module, *found) for module in layer.modules() if (found := _left(module))]
                # vLLM's own hook, which also serves modules that are no CustomOp.
                self._made.append(
                    [
                        (module, name, CustomOp.maybe_compile(module, method))
                        for module, name, method in left
                    ]
                )

    @contextmanager
    def within(self, layer: int) -> Iterator[None]:
        """Let a layer use them inside the block."""
        with ExitStack() as restore:
            for module, name, compiled in self._made[layer]:
                restore.enter_context(replaced(module, name, compiled))
            yield


def _left(module: Any) -> tuple[str, Callable[..., Any]] | None:
    """Return a module's method that vLLM leaves to the compiler, and its attribute name."""
    if isinstance(module, CustomOp):
        kind = type(module)
        is_small = any(f".layers.{name}" in kind.__module__ for name in COMPILED)
        if is_small and not kind.enabled():
            return "_forward_method", module.forward_native
    elif isfunction(getattr(module, "_forward_entry", None)):  # else experts are one opaque op
        return "_forward_impl", module._forward_impl
    return None
