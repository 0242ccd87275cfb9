"""Runs given answers behind a prompt's KV, one after another, each as if it were alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheblend_rag.engines.shutdown import working
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.model_steps import inference
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.prefill import Prefilled
from cacheblend_rag.engines.transformers.priority_lock import PriorityLock


def all_forced_log_probs(
    ordinary: OrdinaryPrefill,
    lock: PriorityLock,
    prefilled: Prefilled,
    token_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
) -> Iterator[Tensor]:
    """Yield ``forced_log_probs`` of each answer, in turns with other users of the model."""
    for answer in answers:
        with working(), lock.taken(), inference():
            found = forced_log_probs(ordinary, prefilled, token_ids, answer)
        yield found


def forced_log_probs(
    ordinary: OrdinaryPrefill,
    prefilled: Prefilled,
    token_ids: Sequence[int],
    answer: Sequence[int],
) -> Tensor:
    """Return the log-probabilities at each step of an answer, (tokens, vocabulary) float32.

    token_ids: the prompt's; whatever was decoded behind it before is forgotten. The prompt's KV is
    as before afterwards.
    """
    logits, more = prefilled.logits, len(answer) - 1
    if more:
        cache = _reusable(prefilled.cache)
        if isinstance(cache, FusedCache):
            cache.crop(len(token_ids))
        later = ordinary.continued(cache, (*token_ids, *answer[:-1]), more)
        logits = torch.cat([logits, later])
    return logits.log_softmax(-1).cpu()


def decodable(prefilled: Prefilled) -> Prefilled:
    """Return a prefilled prompt whose KV cache decoding may extend, so that the original can still
    be used to score answers.
    """
    return replace(prefilled, cache=_reusable(prefilled.cache), answer=[])


def _reusable(cache: Cache | None) -> Cache | None:
    """Return a cache that may be written to; only ours can be cut back, whatever the layers."""
    return cache if isinstance(cache, FusedCache) else copy.deepcopy(cache)
