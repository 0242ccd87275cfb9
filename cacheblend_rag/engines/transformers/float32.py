"""Converts 16-bit weights and arguments to float32 temporarily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def weights_in_float32(weights: Sequence[Tensor]) -> Iterator[None]:
    """Replace 16-bit weights by float32 copies temporarily."""
    narrow = [(weight, weight.data) for weight in weights if weight.dtype in NARROW]
    try:
        for weight, own in narrow:
            weight.data = own.float()
        yield
    finally:
        for weight, own in narrow:
            weight.data = own


def in_float32(given: Any) -> Any:
    """Return a layer's arguments with tensors of 16 bits in float32."""
    if isinstance(given, Tensor):
        return given.float() if given.dtype in NARROW else given
    if isinstance(given, dict):
        return {name: in_float32(part) for name, part in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(in_float32(part) for part in given)
    return given
