"""Intercepts the attention of a Hugging Face model while one of its layers, or all of it, is run.

An attention implementation is registered under our own name and activated, through the model's own
configs, only while a layer or the model runs. No model class is named.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cacheblend_rag.blend.stack import Attend, AttentionCall
from cacheblend_rag.engines.transformers.attention_window import record_sight

DRIVEN = "cacheblend_rag"
"""Active while layers are run or recorded; no masks are built."""
SIGHT = "cacheblend_rag_sight"
"""Active while the layers' masks are recorded."""
ACTIVE = "_attn_implementation_internal"
"""The attribute of a config that names the attention implementation."""

_active = threading.local()


def attention_configs(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of all configs in a model that name an attention implementation.

    As dicts: a config's own getattr and setattr are slow, and each layer that is run needs them.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if ACTIVE in getattr(config, "__dict__", ()):
            found[id(config)] = config
    return [vars(config) for config in found.values()]


class Interception:
    """Replaces the attention of a model's layers by a function temporarily.

    It patches the model meanwhile, so the caller must hold the engine's lock.
    """

    def __init__(self, model: nn.Module) -> None:
        self._configs = attention_configs(model)

    @property
    def replaces_flash(self) -> bool:
        """Whether the model's own attention is a kernel that takes no mask."""
        return any("flash" in str(config[ACTIVE]) for config in self._configs)

    @contextmanager
    def attending(self, layer: int, window: int | None, attend: Attend) -> Iterator[None]:
        """Let a layer's attention use ``attend``, on this thread."""
        with self._passing(repeat((layer, window)), attend):
            yield

    @contextmanager
    def attending_in_order(self, windows: Sequence[int | None], attend: Attend) -> Iterator[None]:
        """Let the attention of all layers use ``attend``, on this thread, while the model runs.

        windows: of each layer. The model must call the layers in order, and each of them its
        attention once.
        """
        with self._passing(enumerate(windows), attend):
            yield

    @contextmanager
    def _passing(self, layers: Iterable[tuple[int, int | None]], attend: Attend) -> Iterator[None]:
        """Pass calls to ``attend``; layers: the layer and the window of each call."""
        _active.layers, _active.attend = iter(layers), attend
        try:
            with self.implementation(DRIVEN):
                yield
        finally:
            del _active.layers, _active.attend

    @contextmanager
    def implementation(self, name: str) -> Iterator[None]:
        """Activate one of our attention implementations."""
        before = [config[ACTIVE] for config in self._configs]
        try:
            for config in self._configs:
                config[ACTIVE] = name
            yield
        finally:
            for config, own in zip(self._configs, before, strict=True):
                config[ACTIVE] = own


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
    """The registered attention function: passes the call to this thread's runner of the layers."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, window = next(_active.layers)
    call = AttentionCall(layer, query, key, value, scaling, window, softcap, s_aux)
    return _active.attend(call), None


AttentionInterface.register(DRIVEN, _intercepted)
AttentionInterface.register(SIGHT, _intercepted)
AttentionMaskInterface.register(SIGHT, record_sight)
