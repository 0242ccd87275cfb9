"""Keeps a model's large weights on a CPU in the layout that oneDNN multiplies by.

PyTorch multiplies float32 by the weights as they lie, through MKL, which rearranges parts of them
in every call. Once rearranged for oneDNN they need none of that: with few rows, as a blend and a
decode step have them, a product takes down to half the time.
"""

from __future__ import annotations

import platform
from collections import Counter

import torch
from torch import Tensor, nn

LEAST_ELEMENTS = 1 << 18
"""Smaller weights stay as they are: their products take less time than calling oneDNN."""
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
"""PyTorch's compiler uses them; builds without oneDNN lack them, and later versions may."""
HINT_ROWS = 512
"""Rows for which oneDNN picks the layout; it takes any number."""


class PackedLinear(nn.Linear):
    """A linear layer whose weight has oneDNN's own layout (``weight.is_mkldnn``).

    ``weight.to_dense()`` is the weight as it was. A weight that is replaced by a dense one is used
    like any other layer's.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` (..., in features) times the weight, plus the bias."""
        if not self.weight.is_mkldnn:
            return super().forward(input)
        if input.dtype is not self.weight.dtype:
            return nn.functional.linear(input, self.weight.to_dense(), self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            input, self.weight, self.bias, "none", [], ""
        )
        return product


def pack_weights(model: nn.Module, least: int = LEAST_ELEMENTS) -> int:
    """Pack the weights of a model's linear layers in place, and return how many were.

    The model is to be used without gradients from then on. Left as they are: weights of fewer than
    ``least`` elements, those that several modules share, those of subclasses of ``nn.Linear``, and
    all where oneDNN has no fast product for them.
    """
    uses = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values()
    )
    linears = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and uses[id(module.weight)] == 1
    ]
    large = [one for one in linears if one.weight.numel() >= least and _can_pack(one.weight)]
    for linear in large:
        _pack(linear)
    return len(large)


def packed_count(model: nn.Module) -> int:
    """Return how many of a model's linear layers have packed weights."""
    return sum(
        isinstance(module, PackedLinear) and module.weight.is_mkldnn for module in model.modules()
    )


def _can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by a weight at least as fast packed as MKL does unpacked."""
    if weight.device.type != "cpu" or platform.machine() not in {"x86_64", "AMD64"}:
        return False
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)
    if not has_operators or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _pack(linear: nn.Linear) -> None:
    dense = linear.weight.detach()
    packed = torch.ops.mkldnn._reorder_linear_weight(dense, HINT_ROWS)
    linear.weight = nn.Parameter(packed, requires_grad=False)
    linear.__class__ = PackedLinear
