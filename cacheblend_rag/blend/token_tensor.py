"""Token ids as a tensor; ``torch.tensor`` of thousands of Python integers takes milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def token_tensor(token_ids: Sequence[int], device: torch.device) -> Tensor:
    """Return (tokens,) int64 on a device."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    return torch.from_numpy(ids).to(device)
