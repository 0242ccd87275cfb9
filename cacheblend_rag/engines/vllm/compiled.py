"""CompiledOps: a compiled model's small operations, for layers that are driven one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp

COMPILED = ("layernorm", "activation", "rotary_embedding")


class CompiledOps:
    """Norms, activations and rotary embeddings of some layers, compiled as vLLM's compiler would.

    In a compiled model these have no kernel of their own: vLLM leaves them to the compiler, which
    writes one. A layer that is driven alone would run them as they are written, operation by
    operation, which is slower and rounds differently. Where vLLM compiles nothing, nor does this.
    """

    def __init__(self, layers: Iterable[nn.Module], vllm_config: VllmConfig) -> None:
        self._made: list[list[tuple[CustomOp, Callable[..., Any]]]] = []
        with set_current_vllm_config(vllm_config):
            for layer in layers:
                left: list[Any] = [op for op in layer.modules() if _is_left_to_compiler(op)]
                self._made.append([(op, op.maybe_compile(op.forward_native)) for op in left])

    @contextmanager
    def within(self, layer: int) -> Iterator[None]:
        """Have a layer use them, as long as it is driven."""
        made = self._made[layer]
        before = [op._forward_method for op, _ in made]
        for op, compiled in made:
            op._forward_method = compiled
        try:
            yield
        finally:
            for (op, _), method in zip(made, before, strict=True):
                op._forward_method = method


def _is_left_to_compiler(module: nn.Module) -> bool:
    kind: Any = type(module)
    return (
        isinstance(module, CustomOp)
        and any(f".layers.{name}" in kind.__module__ for name in COMPILED)
        and not kind.enabled()
    )
