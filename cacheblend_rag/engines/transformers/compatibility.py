"""Whether a model's KV can be blended: a trial on it, and what its config says if that fails."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.stack import probe_layer
from cacheblend_rag.blend.trial import (
    Reference,
    check_embedding,
    check_layers,
    close,
    find_layouts,
    made_up,
    tokens_behind,
    trial_tokens,
)
from cacheblend_rag.engines.compatibility import explained
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.loading import context_window
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.errors import UnsupportedModelError

FAILURES = (
    RuntimeError, TypeError, KeyError, AttributeError, ValueError, IndexError, AssertionError,
)  # fmt: skip


@torch.no_grad()
def open_stack(model: PreTrainedModel) -> TransformersStack:
    """Return the model as a stack that can be blended on.

    Raises UnsupportedModelError, saying what the trial saw and what is known of such configs.
    """
    try:
        return _tried(model)
    except (UnsupportedModelError, *FAILURES) as error:
        recurrent = "recurrent layers cannot be blended" if _is_recurrent(model) else None
        raise UnsupportedModelError(explained(model.config, error, recurrent)) from error


def _is_recurrent(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_is_stateful", False))


def _tried(model: PreTrainedModel) -> TransformersStack:
    stack = TransformersStack(model)
    ids = trial_tokens(int(model.config.get_text_config().vocab_size), stack.geometry.device)
    window = context_window(model)
    first = stack.position_inputs(torch.zeros(1, 1, dtype=torch.long, device=ids.device))
    fused = made_up(
        stack,
        tokens_behind(stack.windows, window),
        probe_layer(stack, 0, stack.embed(ids[None, :1]), first),
    )
    reference, logits = _reference(model, stack, ids, fused)
    check_embedding(stack, reference)
    stack.layouts = find_layouts(stack, ids, window)
    check_layers(stack, reference, fused)
    if not close(stack.logits(reference.outputs[-1][:, -1:])[None], logits[None]):
        raise UnsupportedModelError("what follows its last layer cannot be run alone")
    return stack


def _reference(
    model: PreTrainedModel, stack: TransformersStack, ids: Tensor, fused: FusedKV
) -> tuple[Reference, Tensor]:
    """Have the model compute ``ids`` behind the made-up KV; its layers' results and its logits."""
    start = fused.tokens - ids.numel()
    with stack.recorded() as (inputs, outputs):
        positions = torch.arange(start, fused.tokens, device=ids.device)[None]
        out = model(
            input_ids=ids[None],
            position_ids=positions,
            past_key_values=FusedCache(fused, start),
            use_cache=True,
            logits_to_keep=1,
        )
    return Reference(ids, start, inputs, outputs), out.logits[:, -1].float()
