"""Operations: what a device would be asked to do while something runs, and whether it is read."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "is_nonzero"}
"""Operations whose result the host has to wait for, whatever it is copied to."""
COPIES = {"_to_copy", "copy_"}


class Operations(TorchDispatchMode):
    """Counts operations that an accelerator would be launched for; views cost nothing.

    launched: by name. reads: those that the host has to wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.reads: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        done = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(done) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == "meta" for tensor in [*given, *made]):
            if not function.is_view:
                self.launched[name] += 1
            to_host = name in COPIES and {tensor.device.type for tensor in made} == {"cpu"}
            if name in READS or to_host:
                self.reads.append(name)
        return done
