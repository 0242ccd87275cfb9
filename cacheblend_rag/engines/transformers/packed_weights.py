"""Runs large float32 linear layers on x86 CPUs through oneDNN, with weights packed in its layout.

PyTorch multiplies float32 by the weights as they lie, through MKL, which is slow on CPUs of other
makers than Intel (see `has_slow_mkl`), and rearranges parts of the weights in every call. Once
rearranged for oneDNN they need none of that: with few rows, as a blend and a decode step have them,
a product takes down to half the time. A weight that the output layer shares with the embedding
stays as it is, but oneDNN multiplies a single row by it in half the time, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cacheblend_rag.blend.onednn import (
    bound_caches,
    has_onednn,
    has_slow_mkl,
    onednn_is_faster,
    onednn_linear,
)
from cacheblend_rag.engines.transformers.adapters import has_adapters

LEAST_ELEMENTS, LEAST_ELEMENTS_AVX512 = 1 << 18, 1 << 16
"""Minimum number of elements of a weight that is packed, on CPUs without and with AVX-512. Packing
smaller ones saves too little time."""
HINT_ROWS = 512
"""Batch size that oneDNN optimizes the layout for; inputs may have any number of rows."""


class OneDNNLinear(nn.Linear):
    """``nn.Linear`` whose forward uses oneDNN for float32 on a CPU.

    Its weight is dense, or packed in oneDNN's own layout (``weight.is_mkldnn``); then
    ``weight.to_dense()`` is the weight as it was.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out features): ``input`` (..., in features) times the weight, plus the bias.

        Gradients reach the input, and a weight that is not packed.
        """
        weight = self.weight
        parts = [part for part in (input, weight, self.bias) if part is not None]
        learns = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
        # oneDNN's operator has no gradients, and neither casts nor compiles as others do.
        is_changed = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        is_supported = all(map(_is_plain, parts)) and not learns
        if is_supported and (weight.is_mkldnn or not is_changed):
            return onednn_linear(input, weight, self.bias)
        dense = weight.to_dense() if weight.is_mkldnn else weight
        return nn.functional.linear(input, dense, self.bias)


def _is_plain(tensor: Tensor) -> bool:
    """Whether this is a float32 CPU tensor, and no tensor subclass such as a quantized weight."""
    is_own = type(tensor) not in {Tensor, nn.Parameter}
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and not is_own


def pack_weights(model: nn.Module, least: int | None = None) -> int:
    """Pack the float32 weights of a model's linear layers in place; return how many were packed.

    Those that several modules share stay dense, but their layers multiply through oneDNN, too.
    Left as they are: weights of fewer than ``least`` elements, those of other classes than
    ``nn.Linear`` and ``nn.Parameter`` themselves, layers whose ``forward`` was replaced, models
    with PEFT adapters, and all where oneDNN cannot be used. If least is None, only weights are
    packed whose products get faster: none on Intel's CPUs, elsewhere those of at least
    `LEAST_ELEMENTS` or, with AVX-512, `LEAST_ELEMENTS_AVX512`.
    """
    bound_caches()
    if least is None:
        if not has_slow_mkl():
            return 0
        least = LEAST_ELEMENTS_AVX512 if onednn_is_faster() else LEAST_ELEMENTS
    modules = list(model.modules())
    if not has_onednn() or any(has_adapters(type(module)) for module in modules):
        return 0
    uses = Counter(id(weight) for module in modules for weight in module._parameters.values())
    large = [each for each in _plain_linears(modules) if each[1].numel() >= least]
    own = [(linear, weight) for linear, weight in large if uses[id(weight)] == 1]
    for linear, weight in own:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT_ROWS)
        linear.weight = nn.Parameter(packed, requires_grad=False)
    for linear, _ in large:
        linear.__class__ = OneDNNLinear
    return len(own)


def unpack_weights(model: nn.Module) -> None:
    """Make packed weights dense again, in place: to train or save the model, or merge adapters."""
    for module in model.modules():
        if isinstance(module, OneDNNLinear):
            linear: nn.Linear = module
            if linear.weight.is_mkldnn:
                linear.weight = nn.Parameter(linear.weight.to_dense(), requires_grad=False)
            linear.__class__ = nn.Linear


def packed_count(model: nn.Module) -> int:
    """Return how many of a model's linear layers have packed weights."""
    return sum(
        isinstance(module, OneDNNLinear) and module.weight.is_mkldnn for module in model.modules()
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
