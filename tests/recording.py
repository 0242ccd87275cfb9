"""Does on any device what a CUDA graph does: the same operations again, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Records operations with their arguments; ``replay`` runs them again.

    Tensors keep their addresses, so a replay computes with what they hold by then. Python numbers
    and shapes stay as they were: a replay that needs others computes something wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self._operations.append((function, args, kwargs or {}, made))
        return made

    def noted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that is recorded as a whole, since it does more than operations."""

        def called(*args: Any, **kwargs: Any) -> Tensor:
            with _disable_current_modes():
                made = function(*args, **kwargs)
            self._operations.append((function, args, kwargs, made))
            return made

        return called

    def replay(self) -> None:
        for function, args, kwargs, made in self._operations:
            given = {storage_of(one) for one in tensors((args, kwargs))}
            again = function(*args, **kwargs)
            for kept, new in zip(tensors(made), tensors(again), strict=True):
                if storage_of(kept) not in given:  # neither a view nor in place
                    kept.copy_(new)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
