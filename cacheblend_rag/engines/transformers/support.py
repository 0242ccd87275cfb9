"""Whether a model's KV can be blended: known obstacles by name, then a trial on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.transformers.stack import TransformersStack

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
TRIAL_TOKENS = 24
TRIAL_OFFSET = 1000


def blend_refusal(model: PreTrainedModel) -> str | None:
    """Return why this model cannot be blended, or None when it can.

    Obstacles known by name come first; then a trial: re-rotated keys must equal keys computed in
    place, and a blend pass that recomputes everything must equal ordinary prefill.
    """
    reason = _known_obstacle(model)
    if reason is not None:
        return reason
    try:
        with torch.no_grad():
            return _trial(model)
    except (RuntimeError, TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        return f"its layers cannot be driven one by one ({type(error).__name__}: {error})"


def _known_obstacle(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    obstacles: list[tuple[str, Callable[[Any], object]]] = [
        ("it is an encoder-decoder", lambda c: model.config.is_encoder_decoder),
        ("multi-head latent attention (MLA)", lambda c: getattr(c, "kv_lora_rank", None)),
        ("ALiBi positions", lambda c: getattr(c, "alibi", False)),
        ("layers that share KV", lambda c: getattr(c, "num_kv_shared_layers", 0)),
        ("bidirectional attention", lambda c: getattr(c, "use_bidirectional_attention", False)),
        ("per-layer inputs", lambda c: getattr(c, "hidden_size_per_layer_input", 0)),
    ]
    for name, present in obstacles:
        if present(config):
            return f"{name} cannot be blended"
    for kind in set(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            return f"layers of type {kind} cannot be blended"
    for rope in _rope_parameters(config):
        if rope.get("mrope_section"):
            return "multimodal rotary positions (mrope) cannot be blended"
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            return f"rotary positions of type {kind} cannot be re-rotated"
    return None


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or "rope_theta" in found:
        return [found]
    return [value for value in found.values() if isinstance(value, dict)]


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
