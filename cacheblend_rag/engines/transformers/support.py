"""Whether a model's KV can be blended: known obstacles by name, then a trial on the model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.obstacles import known_obstacle
from cacheblend_rag.engines.transformers.stack import TransformersStack

TRIAL_TOKENS = 24
TRIAL_OFFSET = 1000


def blend_refusal(model: PreTrainedModel) -> str | None:
    """Return why this model cannot be blended, or None when it can.

    Obstacles known by name come first; then a trial: re-rotated keys must equal keys computed in
    place, and a blend pass that recomputes everything must equal ordinary prefill.
    """
    reason = known_obstacle(model.config)
    if reason is not None:
        return reason
    try:
        with torch.no_grad():
            return _trial(model)
    except (RuntimeError, TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        return f"its layers cannot be driven one by one ({type(error).__name__}: {error})"


def _trial(model: PreTrainedModel) -> str | None:
    stack = TransformersStack(model)
    device = stack.geometry.device
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (TRIAL_TOKENS,), generator=generator).to(device)
    place = stack.at(torch.zeros(1, 1, dtype=torch.long, device=device))
    if any(not arguments.get("position_embeddings") for arguments in place.arguments):
        return "no rotary position embeddings (ALiBi or learned positions) to re-rotate"
    if not _rotates(stack, ids):
        return "its rotary embedding cannot be undone by an offset (re-rotation check failed)"
    if not _prefills(stack, model, ids):
        return "a blend pass at ratio 1 differs from ordinary prefill on this model"
    return None


def _rotates(stack: TransformersStack, ids: torch.Tensor) -> bool:
    positions = torch.arange(ids.numel(), device=ids.device)[None]
    near, far = stack.at(positions), stack.at(positions + TRIAL_OFFSET)
    cos, sin = stack.rotation(TRIAL_OFFSET)
    hidden = stack.embed(ids[None])
    for layer in range(stack.geometry.layers):
        keys = stack.probe_layer(layer, hidden, near).key
        wanted = stack.probe_layer(layer, hidden, far).key
        expected_shape = (1, stack.geometry.kv_heads, ids.numel(), stack.geometry.head_dim)
        if keys.shape != expected_shape:
            return False
        moved = rotated(keys, cos[layer : layer + 1], sin[layer : layer + 1])
        if not _close(moved, wanted):
            return False
    return True


def _prefills(stack: TransformersStack, model: PreTrainedModel, ids: torch.Tensor) -> bool:
    fused = FusedKV(stack.geometry, ids.numel())
    nothing = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    schedule = plan_schedule(BlendConfig(selector="all"), stack.geometry.layers)
    trial = BlendPass(
        stack, ids, fused, Candidates(nothing, nothing, torch.zeros_like(ids)), schedule
    )
    trial.run()
    wanted = model(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits[:, -1].float()
    return _close(stack.logits(trial.hidden), wanted)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = 1e-3 if found.dtype == torch.float32 and wanted.dtype == torch.float32 else 5e-2
    scale = wanted.float().abs().max().clamp(min=1e-6)
    return bool((found.float() - wanted.float()).abs().max() <= tolerance * scale)
