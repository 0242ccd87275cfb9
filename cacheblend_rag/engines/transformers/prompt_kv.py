"""Reads a prompt's KV in one layer after a blended or an ordinary prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import BlendConfig

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers.engine import TransformersEngine


@dataclass(frozen=True)
class PromptKV:
    """One layer's KV of a prompt.

    Args:
        keys: (kv_heads, tokens, head_dim), rotated.
        values: (kv_heads, tokens, head_dim).
        reused_tokens: how many kept their stored KV.
    """

    keys: Tensor
    values: Tensor
    reused_tokens: int


def prompt_kv(
    engine: TransformersEngine,
    prompt: PromptLike,
    layer: int,
    *,
    config: BlendConfig | None = None,
    full: bool = False,
) -> PromptKV:
    """Prefill a prompt and return its KV in one layer.

    Args:
        engine: of a model that can be blended.
        prompt: as for generate.
        layer: counted from 0.
        config: as for generate.
        full: whether to prefill without stored KV.

    Raises:
        PromptError: as generate.
        ConfigError: when ``config`` does not suit the model, or it cannot be blended.
    """
    greedy = SamplingParams.greedy(max_tokens=1)
    request = engine._questions.request(prompt, greedy, config, full=full)
    prefilled = engine._prefiller.run(engine._renewed(request))
    if prefilled is None or not isinstance(prefilled.cache, FusedCache):
        raise ConfigError("the KV of a prompt is known of models that can be blended only")
    fused, tokens = prefilled.cache.layers[0].fused, len(request.prepared.token_ids)
    report = engine._questions.report(request, prefilled.report)
    return PromptKV(
        fused.keys[layer, :, :tokens].clone(),
        fused.values[layer, :, :tokens].clone(),
        report.reused_tokens,
    )
