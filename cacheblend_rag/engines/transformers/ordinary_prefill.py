"""Ordinary prefill: runs the model's own forward over a prompt, then token by token.

Models use different caches, and some silently accept a cache of the wrong kind. So each is tested
when it is loaded: continuing from its cache must give the logits of the whole text.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.blend.trial import trial_tokens
from cacheblend_rag.engines.transformers.batched_decode import can_decode_batches
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.loading import is_quantized
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.tolerance import same_logits
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.reason import ReasonCode

logger = logging.getLogger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params")
CONTINUED_TOKENS = 4


@dataclass(frozen=True)
class OrdinaryPrefill:
    """How a model is run without blending.

    stack: of a model that can be blended; its KV goes into a FusedCache. cache_name: the argument
    for the cache of another model; "" if no cache works, so that each token computes
    the whole text again. positioned: whether the model takes the tokens' positions.
    decodes_batches: whether texts with a FusedCache each may be decoded together.
    """

    model: PreTrainedModel
    stack: TransformersStack | None = None
    cache_name: str = "past_key_values"
    positioned: bool = True
    decodes_batches: bool = False

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of the arguments that the model takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    def prefill(self, token_ids: Sequence[int], reserve: int) -> tuple[Cache | None, Tensor]:
        """Return the cache of a prompt, and the next token's logits.

        reserve: capacity for tokens to be decoded. Logits: (1, vocabulary) float32.
        """
        cache: Cache | None = None
        if self.stack is not None:
            fused = FusedKV(self.stack.geometry, len(token_ids), reserve)
            cache = FusedCache(fused, 0, self.stack.windows)
        elif self.cache_name:
            cache = DynamicCache(config=self.model.config)
        return cache, self._run(token_ids, cache)[:, -1]

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
        if self.positioned and "position_ids" in self.parameters:
            positions = torch.arange(start, start + len(token_ids), device=ids.device)
            options["position_ids"] = positions[None]
        if "logits_to_keep" in self.parameters:
            options["logits_to_keep"] = keep
        if cache is not None:
            options[self.cache_name] = cache
        out = self.model(input_ids=ids, use_cache=cache is not None, **options)
        return cast(Tensor, out.logits[:, -keep:].float())


@torch.no_grad()
def find_ordinary_prefill(
    model: PreTrainedModel, stack: TransformersStack | None
) -> OrdinaryPrefill:
    """Return how a model is run without blending; raises ConfigError when it cannot be.

    stack: of a model that can be blended. Raises UnsupportedModelError when it cannot be, since it
    does not continue from KV that was kept for it.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = trial_tokens(vocabulary, torch.device("cpu")).tolist()
    alone = OrdinaryPrefill(model, cache_name="", positioned=False)
    try:
        wanted = alone.continued(None, ids, CONTINUED_TOKENS + 1)
    except Exception as error:
        kind = f"{type(model).__name__} ({type(error).__name__}: {error})"
        raise ConfigError(f"model cannot be run on text alone: {kind}") from error
    for name, positioned in product(CACHE_NAMES, (True, False)):
        way = OrdinaryPrefill(model, stack, name, positioned)
        if name in way.parameters and _continues(way, ids, wanted):
            return replace(way, decodes_batches=_decodes_batches(way, ids, wanted))
    if stack is not None:
        raise UnsupportedModelError(
            "it does not continue from its cached KV", ReasonCode.UNSUPPORTED_MODEL
        )
    logger.warning(
        "%s has no usable cache: for each token of an answer, the whole text is computed again",
        type(model).__name__,
    )
    return alone


def _continues(way: OrdinaryPrefill, ids: list[int], wanted: Tensor) -> bool:
    """Whether continuing a text from its cache gives the same logits as the whole text.

    wanted: (CONTINUED_TOKENS + 1, vocabulary), logits of the last tokens of the whole text.
    """
    try:
        cache, first = way.prefill(ids[:-CONTINUED_TOKENS], CONTINUED_TOKENS)
        ends = range(len(ids) - CONTINUED_TOKENS + 1, len(ids) + 1)
        found = [first, *(way.decode(cache, ids[:end]) for end in ends)]
    except Exception as error:
        logger.debug("%s does not take our cache", type(way.model).__name__, exc_info=error)
        return False
    quantized = is_quantized(way.model)
    return same_logits(torch.cat(found), wanted, way.model.dtype, quantized=quantized)


def _decodes_batches(way: OrdinaryPrefill, ids: list[int], wanted: Tensor) -> bool:
    """Whether texts that are decoded together get the logits that each gets alone.

    wanted: see ``_continues``.
    """
    if way.stack is None:
        return False
    cache, _ = way.prefill(ids, 0)
    if can_decode_batches(way.stack, cast(FusedCache, cache), ids, wanted):
        return True
    logger.info("%s decodes its requests one at a time", type(way.model).__name__)
    return False
