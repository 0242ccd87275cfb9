"""Compares a GGUF file's settings with the config that transformers makes from them.

transformers ignores settings that it does not know, and the model would then silently compute
something else. So a file is refused unless each setting is in the config, or known to have no
effect on the computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cacheblend_rag.models.gguf.header import HUB_FORMAT, CannotConvertError, GgufHeader

IN_SHAPES = {
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "vocab_size",
}
"""Settings whose wrong value would not fit the weights."""
OF_NO_EFFECT = {"context_length", "tensor_data_layout", "rope.scaling.finetuned"}
IN_CONFIG = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "logit_scale": ("logit_scale",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""Each GGUF setting's names in Hugging Face configs; one of them must have its value."""
ROPE_SCALING = "rope.scaling.type"
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH = 1.0, 4.0, 8192


def check_settings(config: Any, header: GgufHeader) -> None:
    """Raise CannotConvertError unless a config has all of a GGUF file's settings."""
    text = config.get_text_config()
    for key, value in header.settings().items():
        if key not in IN_SHAPES | OF_NO_EFFECT and not _carried(text, key, value):
            raise CannotConvertError(
                f"transformers ignores the setting {header.architecture}.{key}="
                f"{value!r}: {HUB_FORMAT}"
            )


def _carried(config: Any, key: str, value: Any) -> bool:
    if key in IN_CONFIG:
        return any(_same(getattr(config, name, None), value) for name in IN_CONFIG[key])
    ropes = list(_ropes(config))
    if key == ROPE_SCALING:
        return value == "none" or any(rope.get("rope_type") == value for rope in ropes)
    if key == "rope.freq_base":
        return any(_same(rope.get("rope_theta"), value) for rope in ropes)
    if key == "rope.dimension_count":
        width = _head_width(config)
        return any(_same(width * rope.get("partial_rotary_factor", 1), value) for rope in ropes)
    if key.startswith("rope.scaling."):
        name = key.removeprefix("rope.scaling.").replace(
            "context_length", "max_position_embeddings"
        )
        return any(_same(rope.get(name), value) for rope in ropes)
    return key == "attention.causal" and bool(value)


def put_rope_factors(config: Any, header: GgufHeader) -> None:
    """Set Llama 3's scaling of rotary frequencies, which GGUF files store as a tensor.

    Raises CannotConvertError when the factors do not follow Llama 3's formula.
    """
    if header.rope_factors is None:
        return
    text = config.get_text_config()
    rope = dict(text.rope_parameters)
    factor = max(header.rope_factors)
    expected = llama3_factors(factor, float(rope["rope_theta"]), len(header.rope_factors))
    if not all(
        math.isclose(held, made, rel_tol=1e-4)
        for held, made in zip(header.rope_factors, expected, strict=True)
    ):
        raise CannotConvertError(
            f"its rotary frequencies are scaled in an unknown way: {HUB_FORMAT}"
        )
    text.rope_parameters = rope | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_LENGTH,
    }


def llama3_factors(factor: float, theta: float, pairs: int) -> list[float]:
    """Return Llama 3's divisors of rotary frequencies, one per pair of components."""
    return [_llama3_factor(factor, theta ** (pair / pairs)) for pair in range(pairs)]


def _llama3_factor(factor: float, slowness: float) -> float:
    turns = LLAMA3_LENGTH / (2 * math.pi * slowness)  # within the original context window
    if turns < LLAMA3_LOW:
        return factor
    if turns > LLAMA3_HIGH:
        return 1.0
    share = (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    return 1 / ((1 - share) / factor + share)


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the config's rotary settings, one for each kind of layer if they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    yield from nested or [rope]


def _head_width(config: Any) -> int:
    head_width = getattr(config, "head_dim", None)
    return int(head_width or config.hidden_size // config.num_attention_heads)


def _same(held: Any, value: Any) -> bool:
    if isinstance(held, bool | int | float) and isinstance(value, bool | int | float):
        return math.isclose(float(held), float(value), rel_tol=1e-6)
    return bool(held == value)
