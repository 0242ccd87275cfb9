"""Tests how a model can be run when it is loaded: layer by layer, from its cache, in batches.

No list of model names decides. Some models silently accept a cache of the wrong kind, so each has
to give the logits of a whole text when it goes on from its cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rounding import close
from cacheblend_rag.blend.trial import (
    Reference,
    check_embedding,
    check_layers,
    find_layouts,
    made_up,
    tokens_behind,
    trial_tokens,
)
from cacheblend_rag.engines.model_files import context_window_in, explained
from cacheblend_rag.engines.transformers.loading import is_quantized
from cacheblend_rag.engines.transformers.ordinary_prefill import (
    FusedCache,
    OrdinaryPrefill,
    decode_batch,
)
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.reason import Reason, ReasonCode

logger = logging.getLogger(__name__)

HEAD_ULPS = 2.0
RECURRENT = Reason(ReasonCode.UNSUPPORTED_LAYERS, "recurrent layers cannot be blended")
FAILURES = (
    RuntimeError, TypeError, KeyError, AttributeError, ValueError, IndexError, AssertionError,
)  # fmt: skip
CACHE_NAMES = ("past_key_values", "cache_params")
CONTINUED_TOKENS = 4
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.0125, torch.bfloat16: 0.1}
"""Largest difference of logits by rounding, as a share of their spread, by the model's dtype.

Measured once, on a CPU, on the models of tests/families with outliers: those that go on from their
cache as they should are off by up to 0.009 in float16 and 0.012 in bfloat16, with another kind of
cache by 0.2 and more; positions off by one make 0.15 and more in 9 of 10. Kernels of a GPU may
round more: SmolLM2's logits in 16 bits are 0.003 and 0.04 off float32's, 0.13 with positions off
by one.
"""
QUANTIZED_TOLERANCE = 0.2
"""That of models whose weights are quantized: some quantize activations by the rows they come with.
"""


# Layer by layer


@torch.no_grad()
def open_stack(model: PreTrainedModel) -> TransformersStack:
    """Return the model as a stack that can be blended on.

    Raises UnsupportedModelError with the test's finding and an explanation from the config.
    """
    try:
        stack = TransformersStack(model)
        _try(stack)
    except (UnsupportedModelError, *FAILURES) as error:
        is_recurrent = getattr(model, "_is_stateful", False)
        why = explained(model.config, error, RECURRENT if is_recurrent else None)
        raise UnsupportedModelError(why, why.code) from error
    return stack


def _try(stack: TransformersStack) -> None:
    """Test a model; raises UnsupportedModelError, or one of FAILURES, if it does not pass."""
    ids, model = _tokens(stack.model, stack.geometry.device), stack.model
    window = context_window_in(model.config.get_text_config())
    fused = made_up(stack, ids, tokens_behind(stack.windows, window))
    reference, logits = _reference(stack, ids, fused)
    check_embedding(stack, reference)
    stack.layouts = find_layouts(stack, ids, window)
    check_layers(stack, reference, fused, quantized=is_quantized(model))
    found = stack.logits(reference.outputs[-1][:, -1:]).to(logits.dtype)
    if not close(found[None], logits[None], ulps=HEAD_ULPS):
        raise UnsupportedModelError(
            "its final norm and output head cannot be run alone", ReasonCode.UNSUPPORTED_MODEL
        )


def _reference(stack: TransformersStack, ids: Tensor, fused: FusedKV) -> tuple[Reference, Tensor]:
    """Run the model on ``ids`` after the synthetic KV; return its layers' results and logits."""
    start = fused.tokens - ids.numel()
    with stack.recorded() as (inputs, outputs):
        positions = torch.arange(start, fused.tokens, device=ids.device)[None]
        out = stack.model(
            input_ids=ids[None],
            position_ids=positions,
            past_key_values=FusedCache(fused, start, stack.windows),
            use_cache=True,
            logits_to_keep=1,
        )
    return Reference(ids, start, inputs, outputs), out.logits[:, -1]


def _tokens(model: PreTrainedModel, device: torch.device) -> Tensor:
    return trial_tokens(int(model.config.get_text_config().vocab_size), device)


# From its cache


@torch.no_grad()
def find_ordinary_prefill(
    model: PreTrainedModel, stack: TransformersStack | None
) -> OrdinaryPrefill:
    """Return how a model is run without blending; raises ConfigError when it cannot be.

    stack: of a model that can be blended. Raises UnsupportedModelError when it cannot be, since it
    does not continue from KV that was kept for it.
    """
    ids = _tokens(model, torch.device("cpu")).tolist()
    alone = OrdinaryPrefill(model, cache_name="")
    try:
        wanted = alone.continued(None, ids, CONTINUED_TOKENS + 1)
    except Exception as error:
        kind = f"{type(model).__name__} ({type(error).__name__}: {error})"
        raise ConfigError(f"model cannot be run on text alone: {kind}") from error
    for name in CACHE_NAMES:
        way = OrdinaryPrefill(model, stack, name)
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


def _continues(way: OrdinaryPrefill, ids: Sequence[int], wanted: Tensor) -> bool:
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


def _decodes_batches(way: OrdinaryPrefill, ids: Sequence[int], wanted: Tensor) -> bool:
    """Whether texts of different lengths, decoded together, get the logits that each gets alone.

    Each of ``wanted`` ends one of the texts; see ``_continues``.
    """
    if way.stack is None:
        return False
    whole, count = cast(FusedCache, way.prefill(ids, 0)[0]), len(wanted)
    try:
        caches = [copy.deepcopy(whole) for _ in range(count)]
        for cache, end in zip(caches, range(len(ids) - count, len(ids)), strict=True):
            cache.crop(end)
        found = decode_batch(way.stack, caches, ids[-count:])
    except Exception as error:
        logger.debug("texts cannot be decoded together", exc_info=error)
    else:
        # Also of quantized weights: some quantize activations by the rows they come with.
        if same_logits(found, wanted, way.stack.geometry.dtype):
            return True
    logger.info("%s decodes its requests one at a time", type(way.model).__name__)
    return False


def same_logits(
    found: Tensor, wanted: Tensor, dtype: torch.dtype, *, quantized: bool = False
) -> bool:
    """Whether logits, (tokens, vocabulary) float32, are equal except for rounding.

    dtype: that the model computes in. In float32 every token's logits must be the same; elsewhere
    the median token counts, since rounding sends a few tokens to other experts.
    """
    off = _centred(found - wanted).norm(dim=-1) / _centred(wanted).norm(dim=-1)
    if quantized:
        return bool(off.median() <= QUANTIZED_TOLERANCE)
    counted = off if dtype == torch.float32 else off.median()
    return bool((counted <= TOLERANCES.get(dtype, 1e-3)).all())


def _centred(logits: Tensor) -> Tensor:
    """Logits without what all tokens of the vocabulary have in common: it changes no answer."""
    return logits - logits.mean(-1, keepdim=True)
