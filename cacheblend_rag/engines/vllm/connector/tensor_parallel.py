"""Exchange of small tensors between tensor-parallel ranks."""

from __future__ import annotations

from typing import cast

from torch import Tensor, distributed
from vllm.distributed.parallel_state import get_tp_group

from cacheblend_rag.blend.stack import Reduction


def all_reduce(part: Tensor, how: Reduction) -> Tensor:
    """Return all tensor-parallel ranks' parts as one; see DecoderStack."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return part
    kinds = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
    whole = part.clone()
    distributed.all_reduce(whole, kinds[how], group=_group(part))
    return whole


def broadcast(part: Tensor) -> Tensor:
    """Return the first tensor-parallel rank's part; see DecoderStack."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return part
    whole = part.clone()
    distributed.broadcast(whole, ranks.first_rank, group=_group(part))
    return whole


def _group(part: Tensor) -> distributed.ProcessGroup:
    """Return the process group for tensors on the device of ``part``."""
    ranks = get_tp_group()
    here = ranks.cpu_group if part.device.type == "cpu" else ranks.device_group
    return cast(distributed.ProcessGroup, here)
