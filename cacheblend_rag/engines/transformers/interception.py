"""Intercepts the attention of a Hugging Face model while one of its layers is run alone.

An attention implementation is registered under our own name and activated, through the model's own
configs, only while a layer runs. No model class is named.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cacheblend_rag.blend.stack import Attend, AttentionCall
from cacheblend_rag.engines.transformers.attention_window import record_sight

DRIVEN = "cacheblend_rag"
"""Active while layers are run or recorded; no masks are built."""
SIGHT = "cacheblend_rag_sight"
"""Active while the layers' masks are recorded."""

_active = threading.local()


class Interception:
    """Replaces the attention of a model's layers by a function temporarily.

    It patches the model meanwhile, so the caller must hold the engine's lock.
    """

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
        self._configs = list(found.values())

    @property
    def replaces_flash(self) -> bool:
        """Whether the model's own attention is a kernel that takes no mask."""
        return any("flash" in str(config._attn_implementation) for config in self._configs)

    @contextmanager
    def attending(self, layer: int, window: int | None, attend: Attend) -> Iterator[None]:
        """Let a layer's attention use ``attend``, on this thread."""
        _active.layer, _active.window, _active.attend = layer, window, attend
        try:
            with self.implementation(DRIVEN):
                yield
        finally:
            del _active.layer, _active.window, _active.attend

    @contextmanager
    def implementation(self, name: str) -> Iterator[None]:
        """Activate one of our attention implementations."""
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = name
            yield
        finally:
            for config, own in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = own


def _intercepted(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: passes the call to this thread's runner of the layer."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(_active.layer, query, key, value, scaling, _active.window, softcap, s_aux)
    return _active.attend(call), None


AttentionInterface.register(DRIVEN, _intercepted)
AttentionInterface.register(SIGHT, _intercepted)
AttentionMaskInterface.register(SIGHT, record_sight)
