"""Replaces a model's attention layers while a decoder layer is run alone.

vLLM's attention layers look themselves up by name in the forward context. While a layer runs alone,
a stand-in has that name: it receives query, key and value after norms and rotary, and the layer's
own code continues with its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)

from cacheblend_rag.blend.stack import Attend, AttentionCall


class StandIns:
    """Gives decoder layers that run alone a forward context, with a stand-in for their attention.

    attention: the worker's attention layers by name, in order.
    """

    def __init__(self, attention: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        self._attention, self._config = list(attention.items()), vllm_config

    @contextmanager
    def answering(self, layer: int, attend: Attend) -> Iterator[None]:
        """Let a layer's attention use ``attend``."""
        name, attention = self._attention[layer]
        with self.context({name: _StandIn(layer, attention, attend)}):
            yield

    @contextmanager
    def context(self, stand_ins: Mapping[str, Any] | None = None, **changes: Any) -> Iterator[None]:
        """Set a separate forward context: the running step's metadata belongs to other tokens."""
        with set_forward_context(None, self._config):
            context: ForwardContext = get_forward_context()
        own = replace(
            context,
            no_compile_layers={**context.no_compile_layers, **(stand_ins or {})},
            all_moe_layers=None,  # a layer that is run alone looks its experts up by name
            **changes,
        )
        with override_forward_context(own):
            yield


class _StandIn:
    """Replaces an attention layer while it runs; it is its own ``impl``, too."""

    def __init__(self, index: int, layer: Any, attend: Attend) -> None:
        self.index, self.layer, self.attend = index, layer, attend
        self.layer_name, self.kv_cache = layer.layer_name, layer.kv_cache

    @property
    def impl(self) -> _StandIn:
        """No attribute: in a circle of references, it would keep a pass's memory for a while."""
        return self

    def do_kv_cache_update(self, *_: Any, **__: Any) -> None:
        """Store nothing: the caller that runs the layer does."""

    def forward(  # noqa: PLR0917 (vLLM's signature)
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **_: Any,
    ) -> Tensor:
        """Pass (rows, heads, head_dim) on as an AttentionCall; write the result."""
        impl = self.layer.impl
        if query.dtype != key.dtype:  # with an fp8 cache, some kernels take the query quantized
            query = query.to(key.dtype) * self.layer._q_scale.to(key.dtype)
        call = AttentionCall(
            layer=self.index,
            query=query.transpose(0, 1)[None],
            key=key.transpose(0, 1)[None],
            value=value.transpose(0, 1)[None],
            scaling=float(impl.scale),
            window=window_of(self.layer),
            softcap=softcap_of(self.layer),
            sinks=getattr(impl, "sinks", None),
        )
        output.copy_(self.attend(call)[0].reshape(output.shape))
        return output


def on_first_row(attend: Attend) -> Attend:
    """Compute attention for the first of two equal rows, and use it for both."""

    def both(call: AttentionCall) -> Tensor:
        one = {name: getattr(call, name)[:, :, :1] for name in ("query", "key", "value")}
        return attend(replace(call, **one)).repeat(1, 2, 1, 1)

    return both


def window_of(attention: Any) -> int | None:
    """Return an attention layer's sliding window in tokens, itself included, or None."""
    window = getattr(attention, "sliding_window", None)
    return int(window) if window else None


def softcap_of(attention: Any) -> float | None:
    """Return the softcap of an attention layer's logits, or None."""
    return float(getattr(attention.impl, "logits_soft_cap", None) or 0) or None
