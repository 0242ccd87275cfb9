"""Tests whether a model's KV can be blended, and explains a failure from its config."""

from __future__ import annotations

import logging

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
from cacheblend_rag.engines.compatibility import explained
from cacheblend_rag.engines.model_files import context_window_in
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.loading import is_quantized
from cacheblend_rag.engines.transformers.stack import NARROW, TransformersStack
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import Reason, ReasonCode

logger = logging.getLogger(__name__)

HEAD_ULPS = 2.0
RECURRENT = Reason(ReasonCode.UNSUPPORTED_LAYERS, "recurrent layers cannot be blended")
FAILURES = (
    RuntimeError, TypeError, KeyError, AttributeError, ValueError, IndexError, AssertionError,
)  # fmt: skip


@torch.no_grad()
def open_stack(model: PreTrainedModel) -> TransformersStack:
    """Return the model as a stack that can be blended on.

    Raises UnsupportedModelError with the test's finding and an explanation from the config.
    """
    try:
        return _tried(model)
    except (UnsupportedModelError, *FAILURES) as error:
        is_recurrent = getattr(model, "_is_stateful", False)
        why = explained(model.config, error, RECURRENT if is_recurrent else None)
        raise UnsupportedModelError(why, why.code) from error


def _tried(model: PreTrainedModel) -> TransformersStack:
    """Test the model; 16-bit layers are compared in float32 if they can be run so."""
    stack = TransformersStack(model)
    if stack.geometry.dtype in NARROW and not is_quantized(model):
        try:
            _try(model, stack, wide=True)
        except FAILURES as error:
            logger.debug("layers are compared in 16 bits", exc_info=error)
        else:
            return stack
    _try(model, stack, wide=False)
    return stack


def _try(model: PreTrainedModel, stack: TransformersStack, *, wide: bool) -> None:
    """Test the model; raises UnsupportedModelError, or one of FAILURES, if it does not pass.

    wide: whether its layers are run in float32, one at a time.
    """
    ids = trial_tokens(int(model.config.get_text_config().vocab_size), stack.geometry.device)
    window = context_window_in(model.config.get_text_config())
    dtype = stack.geometry.dtype
    behind = tokens_behind(stack.windows, window)
    fused = made_up(stack, ids, behind, torch.float32 if wide else dtype)
    reference, logits = _reference(model, stack, ids, fused, wide=wide)
    check_embedding(stack, reference)
    stack.layouts = find_layouts(stack, ids, window)
    widened = stack.widened if wide else None
    check_layers(stack, reference, fused, quantized=is_quantized(model), widened=widened)
    found = stack.logits(reference.outputs[-1][:, -1:].to(dtype)).to(logits.dtype)
    if not close(found[None], logits[None], ulps=HEAD_ULPS):
        raise UnsupportedModelError(
            "its final norm and output head cannot be run alone", ReasonCode.UNSUPPORTED_MODEL
        )


def _reference(
    model: PreTrainedModel, stack: TransformersStack, ids: Tensor, fused: FusedKV, *, wide: bool
) -> tuple[Reference, Tensor]:
    """Run the model on ``ids`` after the synthetic KV; return its layers' results and logits."""
    start = fused.tokens - ids.numel()
    with stack.recorded(wide=wide) as (inputs, outputs):
        positions = torch.arange(start, fused.tokens, device=ids.device)[None]
        out = model(
            input_ids=ids[None],
            position_ids=positions,
            past_key_values=FusedCache(fused, start, stack.windows),
            use_cache=True,
            logits_to_keep=1,
        )
    return Reference(ids, start, inputs, outputs), out.logits[:, -1]
