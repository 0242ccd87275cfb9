"""PeakBytes: how much memory tensors take at most while something runs, on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operations make, from when they are made until they are gone.

    peak: the most bytes that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves(args) if isinstance(t, Tensor)}
        done = function(*args, **(kwargs or {}))
        for made in tree_leaves(done):
            if isinstance(made, Tensor):
                self._note(made, given)
        return done

    def _note(self, made: Tensor, given: set[int]) -> None:
        storage = made.untyped_storage()
        address = storage.data_ptr()
        if address in self._known or id(storage) in given or not storage.nbytes():
            return
        self._known.add(address)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._now -= size
