"""One decode step of several texts as one forward pass, each text on a KV cache of its own.

Projections, norms and experts run on all texts at once; attention runs text by text, since each has
a cache of its own length. No KV is copied or padded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_rag.blend.attention import attend_token
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.tolerance import same_logits

logger = logging.getLogger(__name__)


def decode_batch(
    stack: TransformersStack, caches: Sequence[FusedCache], token_ids: Sequence[int]
) -> Tensor:
    """Return the logits after each text's last token, (texts, vocabulary) float32.

    caches: each text's KV but the last token's, which it gets; after an error each holds what it
    held before. token_ids: each text's last token.
    """
    lengths = [cache.get_seq_length() for cache in caches]
    device = stack.geometry.device

    def attend(call: AttentionCall) -> Tensor:
        return torch.cat([_attended(call, row, cache) for row, cache in enumerate(caches)])

    ids = torch.tensor(token_ids, device=device)[:, None]
    positions = torch.tensor(lengths, device=device)[:, None]
    try:
        return stack.next_logits(ids, positions, attend)
    except BaseException:
        for cache, length in zip(caches, lengths, strict=True):
            cache.crop(length)
        raise


def _attended(call: AttentionCall, row: int, cache: FusedCache) -> Tensor:
    """Write one text's new KV into its cache; return its attention, (1, 1, heads, head_dim)."""
    here = slice(row, row + 1)
    keys, values = cache.layers[call.layer].update(call.key[here], call.value[here])
    if call.window is not None:
        first = max(0, keys.shape[2] - call.window)
        keys, values = keys[:, :, first:], values[:, :, first:]
    return attend_token(
        call.query[here],
        keys,
        values,
        scaling=call.scaling,
        softcap=call.softcap,
        sinks=call.sinks,
    )


def can_decode_batches(
    stack: TransformersStack, cache: FusedCache, token_ids: Sequence[int], wanted: Tensor
) -> bool:
    """Whether texts of different lengths, decoded together, get the logits they get alone.

    cache: the KV of a text, ``token_ids``. wanted: (tokens, vocabulary), the logits of its last
    tokens, each of which ends one of the texts.
    """
    count = len(wanted)
    ends = range(len(token_ids) - count, len(token_ids))
    try:
        caches = [copy.deepcopy(cache) for _ in ends]
        for each, end in zip(caches, ends, strict=True):
            each.crop(end)
        found = decode_batch(stack, caches, token_ids[-count:])
    except Exception as error:
        logger.debug("%s cannot decode texts together", type(stack.model).__name__, exc_info=error)
        return False
    # Also of quantized weights: some quantize activations by the rows they come with.
    return same_logits(found, wanted, stack.geometry.dtype)
