"""Packs large weights of linear layers on x86 CPUs into oneDNN's blocked memory layout.

PyTorch multiplies float32 by the weights as they lie, through MKL, which rearranges parts of them
in every call. Once rearranged for oneDNN they need none of that: with few rows, as a blend and a
decode step have them, a product takes down to half the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cacheblend_rag.blend.onednn import (
    bound_caches,
    has_fast_matmul,
    has_onednn,
    onednn_linear,
)
from cacheblend_rag.engines.transformers.adapters import has_adapters

LEAST_ELEMENTS, LEAST_ELEMENTS_AVX512 = 1 << 18, 1 << 16
"""Minimum number of elements of a weight that is packed, on CPUs without and with AVX-512. Packing
smaller ones saves too little time."""
HINT_ROWS = 512
"""Batch size that oneDNN optimizes the layout for; inputs may have any number of rows."""


class PackedLinear(nn.Linear):
    """A linear layer whose weight has oneDNN's own layout (``weight.is_mkldnn``).

    ``weight.to_dense()`` is the weight as it was. A weight that is replaced by a dense one is used
    like any other layer's.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out features): ``input`` (..., in features) times the weight, plus the bias.

        Gradients reach the input, not the weight.
        """
        weight = self.weight
        if not weight.is_mkldnn:
            return super().forward(input)
        needs_gradient = torch.is_grad_enabled() and input.requires_grad
        if needs_gradient or input.dtype is not weight.dtype:  # oneDNN's operator has neither
            return nn.functional.linear(input, weight.to_dense(), self.bias)
        return onednn_linear(input, weight, self.bias)


def pack_weights(model: nn.Module, least: int | None = None) -> int:
    """Pack the float32 weights of a model's linear layers in place; return how many were packed.

    Left as they are: weights of fewer than ``least`` elements (None: `LEAST_ELEMENTS`, or
    `LEAST_ELEMENTS_AVX512`), those that several modules share, those of other classes than
    ``nn.Linear`` and ``nn.Parameter`` themselves, layers whose ``forward`` was replaced, models
    with PEFT adapters, and all where oneDNN cannot be used.
    """
    bound_caches()
    if least is None:
        least = LEAST_ELEMENTS_AVX512 if has_fast_matmul() else LEAST_ELEMENTS
    modules = list(model.modules())
    if not has_onednn() or any(has_adapters(type(module)) for module in modules):
        return 0
    uses = Counter(id(weight) for module in modules for weight in module._parameters.values())
    large = [
        (linear, weight)
        for linear, weight in _plain_linears(modules)
        if weight.numel() >= least and uses[id(weight)] == 1
    ]
    for linear, weight in large:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT_ROWS)
        linear.weight = nn.Parameter(packed, requires_grad=False)
        linear.__class__ = PackedLinear
    return len(large)


def unpack_weights(model: nn.Module) -> None:
    """Make packed weights dense again, in place: to train or save the model, or merge adapters."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            linear: nn.Linear = module
            if linear.weight.is_mkldnn:
                linear.weight = nn.Parameter(linear.weight.to_dense(), requires_grad=False)
            linear.__class__ = nn.Linear


def packed_count(model: nn.Module) -> int:
    """Return how many of a model's linear layers have packed weights."""
    return sum(
        isinstance(module, PackedLinear) and module.weight.is_mkldnn for module in model.modules()
    )


def _plain_linears(modules: list[nn.Module]) -> Iterator[tuple[nn.Linear, Tensor]]:
    """Yield unquantized linear layers whose weight is a dense float32 tensor on a CPU, with it."""
    for module in modules:
        weight = module._parameters.get("weight")
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
            continue
        if weight.device.type == "cpu" and weight.dtype is torch.float32:
            yield module, weight
