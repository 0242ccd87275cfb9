"""Ordinary prefill: runs the model's own forward over a prompt, then token by token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.engines.answer import RawLogprob
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.stack import TransformersStack

SCORED_ROWS = 256
"""So many tokens' logits are held at once while a prompt is scored."""


def raw_logprob(logits: Tensor, token: int, most: int) -> RawLogprob:
    """Return the log-probability of a token and of the ``most`` likely ones, by logits."""
    shares = logits.float().log_softmax(-1)
    top = shares.topk(most)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return RawLogprob(token, float(shares[token]), tuple(pairs))


@dataclass(frozen=True)
class OrdinaryPrefill:
    """How a model is run without blending.

    stack: of a model that can be blended; its KV goes into a FusedCache. cache_name: the argument
    for the cache of another model; "" if no cache works, so that each token computes
    the whole text again. decodes_batches: whether texts with a FusedCache each may be decoded
    together.
    """

    model: PreTrainedModel
    stack: TransformersStack | None = None
    cache_name: str = "past_key_values"
    decodes_batches: bool = False

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the arguments that the model takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    def prefill(self, token_ids: Sequence[int], reserve: int) -> tuple[Cache | None, Tensor]:
        """Return the cache of a prompt, and the next token's logits.

        reserve: capacity for tokens to be decoded. Logits: (1, vocabulary) float32.
        """
        cache = self._empty_cache(len(token_ids), reserve)
        return cache, self._run(token_ids, cache)[:, -1]

    def scored(
        self, token_ids: Sequence[int], reserve: int, most: int
    ) -> tuple[Cache | None, Tensor, list[RawLogprob]]:
        """Return as ``prefill`` does, and the log-probability of each token; NaN for the first.

        most: so many of the most likely tokens are told, too.
        """
        cache = self._empty_cache(len(token_ids), reserve)
        # Only our cache is known to take several tokens behind others, whatever the layers.
        rows = SCORED_ROWS if isinstance(cache, FusedCache) else len(token_ids)
        told = [RawLogprob(token_ids[0], math.nan, ())]
        for start in range(0, len(token_ids), rows):
            part = token_ids[start : start + rows]
            logits = self._run(part, cache, start=start, keep=len(part))[0]
            following = token_ids[start + 1 : start + 1 + len(part)]
            told += [raw_logprob(row, token, most) for row, token in zip(logits, following)]  # noqa: B905
        return cache, logits[-1:], told

    def _empty_cache(self, tokens: int, reserve: int) -> Cache | None:
        if self.stack is not None:
            fused = FusedKV(self.stack.geometry, tokens, reserve)
            return FusedCache(fused, 0, self.stack.windows)
        return DynamicCache(config=self.model.config) if self.cache_name else None

    def decode(self, cache: Cache | None, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after ``token_ids``; ``cache`` holds all of them but the last."""
        return self.continued(cache, token_ids, 1)

    def continued(self, cache: Cache | None, token_ids: Sequence[int], count: int) -> Tensor:
        """Return the logits after each of the last tokens, (count, vocabulary) float32.

        cache: holds all but those, and gets them, too; without one the whole text is computed.
        """
        start = 0 if cache is None else len(token_ids) - count
        return self._run(token_ids[start:], cache, start=start, keep=count)[0]

    def _run(
        self, token_ids: Sequence[int], cache: Cache | None, start: int = 0, keep: int = 1
    ) -> Tensor:
        """Return (1, keep, vocabulary) float32 logits, of the last tokens."""
        ids = token_tensor(token_ids, self.model.device)[None]
        options: dict[str, Any] = {}
        if "logits_to_keep" in self.parameters:
            options["logits_to_keep"] = keep
        if cache is not None:
            options[self.cache_name] = cache
            if "position_ids" in self.parameters:
                positions = torch.arange(start, start + len(token_ids), device=ids.device)
                options["position_ids"] = positions[None]
        out = self.model(input_ids=ids, use_cache=cache is not None, **options)
        return cast(Tensor, out.logits[:, -keep:].float())
