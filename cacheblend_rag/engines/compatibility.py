"""What is known to stand in the way of blending, from a model's config.

Whether a model can be blended is found by a trial; this only says why one fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cacheblend_rag.errors import CacheBlendError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")


def known_obstacle(whole: Any) -> str | None:
    """Return why models of this Hugging Face config may not be blendable, or None."""
    config = whole.get_text_config()
    nested = getattr(config, "attn_config", None)
    obstacles: list[tuple[str, Callable[[Any], object]]] = [
        ("encoder-decoders", lambda _: whole.is_encoder_decoder),
        ("multi-head latent attention (MLA)", lambda c: getattr(c, "kv_lora_rank", None)),
        (
            "ALiBi positions",
            lambda c: c.model_type == "bloom" or any(getattr(x, "alibi", 0) for x in (c, nested)),
        ),
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


def explained(config: Any, error: Exception, otherwise: str | None = None) -> str:
    """Return why a model failed its trial: what the trial saw, and what is known of such models.

    otherwise: what else is known of it, where its config tells nothing.
    """
    known = known_obstacle(config) or otherwise
    if not isinstance(error, CacheBlendError):
        seen = f"its layers cannot be driven one by one ({type(error).__name__}: {error})"
        return known or seen
    return str(error) if known in {None, str(error)} else f"{known}: {error}"


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or "rope_theta" in found:
        return [found]
    return [value for value in found.values() if isinstance(value, dict)]
