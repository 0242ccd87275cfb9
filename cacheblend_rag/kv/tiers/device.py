"""Chunk KV in an accelerator's memory, which needs no copy over the bus."""

from __future__ import annotations

import torch

from cacheblend_rag.kv.tiers.host import HostTier
from cacheblend_rag.kv.tiers.policy import TierPolicy


class DeviceTier(HostTier):
    """As HostTier, on the device where the engine computes.

    device: where tensors are kept; a chunk from elsewhere is copied there.
    """

    def __init__(
        self,
        device: torch.device | str,
        capacity_bytes: int | None = None,
        *,
        name: str = "device",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(capacity_bytes, name=name, policy=policy)
        self.device = torch.device(device)
