"""What a model's config tells about why the model cannot be blended.

Whether it can be is found by a trial, and the trial's own words come with every reason. The config
only adds what explains them: rotary settings explain keys that cannot be moved and nothing else.
"""

from __future__ import annotations

from typing import Any

from cacheblend_rag.errors import CacheBlendError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION_TYPES = ("full_attention", "sliding_attention", "attention")


KEYS_CANNOT_BE_MOVED = "rotary embedding cannot be undone"
"""What the trial says where a model's rotary settings are the reason."""


def known_obstacle(whole: Any) -> str | None:
    """Return what in a Hugging Face config is known to stand in the way of blending, or None."""
    config = whole.get_text_config()
    nested = getattr(config, "attn_config", None)
    obstacles: dict[str, object] = {
        "encoder-decoders": whole.is_encoder_decoder,
        "multi-head latent attention (MLA)": getattr(config, "kv_lora_rank", None),
        "ALiBi positions": config.model_type == "bloom"
        or any(getattr(part, "alibi", 0) for part in (config, nested)),
        "layers that share KV": getattr(config, "num_kv_shared_layers", 0),
        # Some families name here what may see later tokens: "vision" says nothing about text.
        "bidirectional attention": getattr(config, "use_bidirectional_attention", None)
        in (True, "all"),
        "per-layer inputs": getattr(config, "hidden_size_per_layer_input", 0),
    }
    for name, present in obstacles.items():
        if present:
            return f"{name} cannot be blended"
    return _other_layers(config)


def _other_layers(config: Any) -> str | None:
    """Say which types of layers are no attention, in the order in which the layers stand."""
    types = dict.fromkeys(getattr(config, "layer_types", None) or ())
    others = [kind for kind in types if kind not in ATTENTION_TYPES]
    if not others:
        return None
    return f"layers of type {' and '.join(others)} cannot be blended"


def known_rotary(whole: Any) -> str | None:
    """Return which rotary positions of a config are known to change with the prompt, or None."""
    for rope in _rope_parameters(whole.get_text_config()):
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            return f"rotary positions of type {kind} cannot be re-rotated"
    return None


def explained(config: Any, error: Exception, otherwise: str | None = None) -> str:
    """Return why a model failed its trial: what the trial saw, and what is known of such models.

    otherwise: what else is known of it, where its config tells nothing.
    """
    known = known_rotary(config) if KEYS_CANNOT_BE_MOVED in str(error) else known_obstacle(config)
    known = known or otherwise
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
