"""Explains from a model's config why the model cannot be blended.

A test of the model decides whether it can be, and its finding is part of every reason. The config
only adds an explanation: rotary settings explain keys that cannot be moved, and nothing else.
"""

from __future__ import annotations

from typing import Any

from cacheblend_rag.errors import CacheBlendError, UnsupportedModelError
from cacheblend_rag.reason import Reason, ReasonCode

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION_TYPES = ("full_attention", "sliding_attention", "attention")
KEYS_CANNOT_BE_MOVED = "rotary embedding cannot be undone"
"""The test's finding that a model's rotary settings may explain."""


def known_obstacle(whole: Any) -> Reason | None:
    """Return a property in a Hugging Face config that is known to prevent blending, or None."""
    config = whole.get_text_config()
    nested = getattr(config, "attn_config", None)
    alibi = any(getattr(part, "alibi", 0) for part in (config, nested))
    # Some families name here what may see later tokens: "vision" says nothing about text.
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    alibi = alibi or config.model_type == "bloom"
    latent = getattr(config, "kv_lora_rank", None)
    shared = getattr(config, "num_kv_shared_layers", 0)
    inputs = getattr(config, "hidden_size_per_layer_input", 0)
    for present, code, name in (
        (whole.is_encoder_decoder, ReasonCode.UNSUPPORTED_MODEL, "encoder-decoders"),
        (latent, ReasonCode.UNSUPPORTED_ATTENTION, "multi-head latent attention (MLA)"),
        (alibi, ReasonCode.UNSUPPORTED_POSITIONS, "ALiBi positions"),
        (shared, ReasonCode.UNSUPPORTED_ATTENTION, "layers that share KV"),
        (both_ways, ReasonCode.UNSUPPORTED_ATTENTION, "bidirectional attention"),
        (inputs, ReasonCode.UNSUPPORTED_LAYERS, "per-layer inputs"),
    ):
        if present:
            return Reason(code, f"{name} cannot be blended")
    return _other_layers(config)


def _other_layers(config: Any) -> Reason | None:
    """Return the types of layers that are no attention, in the order of the layers."""
    types = dict.fromkeys(getattr(config, "layer_types", None) or ())
    others = [kind for kind in types if kind not in ATTENTION_TYPES]
    if not others:
        return None
    told = f"layers of type {' and '.join(others)} cannot be blended"
    return Reason(ReasonCode.UNSUPPORTED_LAYERS, told)


def known_rotary(whole: Any) -> Reason | None:
    """Return a config's rotary type if it is known to change with the prompt, or None."""
    for rope in _rope_parameters(whole.get_text_config()):
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            told = f"rotary positions of type {kind} cannot be re-rotated"
            return Reason(ReasonCode.UNSUPPORTED_POSITIONS, told)
    return None


def explained(config: Any, error: Exception, otherwise: Reason | None = None) -> Reason:
    """Return why a model failed its test: the finding, and an explanation from its config.

    otherwise: an explanation to use if the config has none.
    """
    known = known_rotary(config) if KEYS_CANNOT_BE_MOVED in str(error) else known_obstacle(config)
    known = known or otherwise
    if not isinstance(error, CacheBlendError):
        seen = f"its layers cannot be run one by one ({type(error).__name__}: {error})"
        return known or Reason(ReasonCode.UNSUPPORTED_LAYERS, seen)
    if known is not None:
        return known if known == str(error) else Reason(known.code, f"{known}: {error}")
    if isinstance(error, UnsupportedModelError):
        return error.reason
    return Reason(ReasonCode.UNSUPPORTED_MODEL, str(error))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or "rope_theta" in found:
        return [found]
    return [value for value in found.values() if isinstance(value, dict)]
