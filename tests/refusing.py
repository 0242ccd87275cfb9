"""A device that refuses memory: allocations that fail as PyTorch's do, where a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSALS: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)."),
    "python": MemoryError,
}


class RefusingDevice(TorchDispatchMode):
    """Counts allocations, and refuses the ``nth`` one, or all of more than ``most`` bytes.

    An operation allocates when what it returns is none of what it was given, nor a view of it.
    """

    def __init__(
        self, nth: int | None = None, *, most: int | None = None, kind: str = "cuda"
    ) -> None:
        super().__init__()
        self.nth, self.most = nth, most
        self.allocations = self.refused = 0
        self._refusal = REFUSALS[kind]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.is_view:
            return out
        given = {_storage(each) for each in _tensors((args, kwargs))}
        new = [each for each in _tensors(out) if _storage(each) not in given]
        if new:
            self.allocations += 1
            nbytes = max(each.untyped_storage().nbytes() for each in new)
            if self.allocations == self.nth or (self.most is not None and nbytes > self.most):
                self.refused += 1
                raise self._refusal()
        return out


def on_device(device: RefusingDevice, steps: Callable[..., Any]) -> Callable[..., Any]:
    """Return steps, a generator function, that allocate on such a device and nowhere else."""

    def run(*arguments: Any, **options: Any) -> Iterator[Any]:
        work = steps(*arguments, **options)
        while True:
            with device:
                try:
                    item = next(work)
                except StopIteration as done:
                    return done.value
            yield item

    return run


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
