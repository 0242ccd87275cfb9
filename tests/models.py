"""Tiny random models of each supported family, and a word tokenizer, for exactness tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cacheblend_rag import BlendPrompt, Chunk

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
HEAD = {"head_dim": 16}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama-llama3-rope": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
    "mistral-sliding": lambda: MistralConfig(**SHAPE, sliding_window=48),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, **HEAD),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE, **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "gemma2": lambda: Gemma2Config(**SHAPE, **HEAD, query_pre_attn_scalar=16, sliding_window=48),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 6},
        **HEAD,
        query_pre_attn_scalar=16,
        sliding_window=48,
        sliding_window_pattern=3,
    ),
    "phi3": lambda: Phi3Config(**SHAPE),
}


QWEN_SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.1,
}
"""The sampling settings that Qwen2.5-Instruct models come with."""
GPT2_CONFIG = GPT2Config(
    vocab_size=VOCABULARY, n_embd=256, n_layer=2, n_head=4, n_positions=2048, bos_token_id=1
)


def make_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, *, vocab_size: int = VOCABULARY
) -> PreTrainedModel:
    """A random model of the family, always the same one."""
    torch.manual_seed(7)
    config = FAMILIES[family]()
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def prompt_of(*parts: str | Chunk) -> BlendPrompt:
    """A prompt of these parts with a space between them, so that none is within a word."""
    spaced = [part for each in parts for part in (each, " ")]
    return BlendPrompt.of(*spaced[:-1])


def save_model(
    family: str, folder: Path, head_dim: int, generation: dict[str, Any] | None = None
) -> None:
    """Save a random model, with heads as wide as vLLM's kernels need them.

    family: one of FAMILIES, or ``gpt2``, whose KV cannot be moved. generation: what its
    generation_config.json holds beside special tokens.
    """
    config = GPT2_CONFIG if family == "gpt2" else FAMILIES[family]()
    config.hidden_size = config.num_attention_heads * head_dim
    if getattr(config, "head_dim", None) is not None:
        config.head_dim = head_dim
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    model.float().save_pretrained(folder)
    if generation:
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **generation}))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words w2 .. w255, split at white space, with nothing put in front; others are read as w2."""
    words = {"<pad>": 0, "<bos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>")


def words(count: int, seed: int) -> str:
    """Random text of exactly ``count`` tokens."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(count))
