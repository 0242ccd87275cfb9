"""The decoders that one training recipe builds, by name, with fresh weights.

`llama` is the bundled toy. `qknorm` is a Qwen3: queries and keys are normalized per head.
`sliding` is a Gemma 3: every other layer sees the last `WINDOW` tokens only and rotates its keys
with another base than the layers that see everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tests.demo.attention import ATTENTION
from tests.demo.tokenizer import BOS_ID, EOS_ID, MAX_LENGTH, PAD_ID

WINDOW = 128


@dataclass(frozen=True)
class ModelShape:
    """The size of the decoder, and after how many layers the probe reads."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 384
    probe_layer: int = 2


DEFAULT_ARCHITECTURE = "llama"
ARCHITECTURES = (DEFAULT_ARCHITECTURE, "qknorm", "sliding")


def build_model(
    architecture: str, shape: ModelShape, vocabulary: int, seed: int
) -> PreTrainedModel:
    """Return a decoder with fresh weights, deterministic in the seed."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        _config(architecture, shape, vocabulary), attn_implementation=ATTENTION
    )
    return model


def _config(architecture: str, shape: ModelShape, vocabulary: int) -> PretrainedConfig:
    head = shape.hidden // shape.heads
    common = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if architecture == DEFAULT_ARCHITECTURE:
        return LlamaConfig(**common)
    if architecture == "qknorm":
        return Qwen3Config(**common, head_dim=head)
    kinds = [f"{kind}_attention" for kind in ("sliding", "full")]
    return Gemma3TextConfig(
        **common,
        head_dim=head,
        query_pre_attn_scalar=head,
        sliding_window=WINDOW,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        layer_types=[kinds[layer % 2] for layer in range(shape.layers)],
    )
