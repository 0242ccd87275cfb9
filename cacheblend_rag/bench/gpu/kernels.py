"""The kernels that are measured: the one place to add another.

``own`` is what a pass runs by itself, whatever it chooses on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cacheblend_rag.blend.flex import FlexAttention
from cacheblend_rag.blend.passes import Attention
from cacheblend_rag.blend.row_attention import RowAttention

OWN = "own"
ATTENTION: Mapping[str, Callable[[], Attention]] = {
    OWN: RowAttention,
    "own without kernels": partial(RowAttention, kernels=False),
    "flex": FlexAttention,
}
"""Makes an attention for one pass, by name. FlexAttention is measured on CUDA only."""
