"""A tiny random Llama as a GGUF file, written as llama.cpp's converter writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
BYTES = list(bytes_to_unicode().values())
MERGED = ("Ġt", "he", "Ġthe", "12", "ĠĠ")
MERGES = ("Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ")
VOCABULARY = [*CONTROL, *BYTES, *MERGED]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(seed: int = 3, **settings: Any) -> LlamaForCausalLM:
    """A random Llama whose logits depend on everything in it."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **settings})).float().eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    tokenizer: bool = True,
    quantized: bool = False,
    settings: dict[str, Any] | None = None,
    leave_out: str | None = None,
    rope_factors: list[float] | None = None,
    parts: int = 0,
    roles: dict[str, int] | None = None,
) -> Path:
    """Write a model.

    settings: more metadata by key. leave_out: a tensor's name. roles: ids of special tokens.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (settings or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    if parts:
        writer.add_uint16("split.count", parts)
    if tokenizer:
        _add_tokenizer(writer, pre, {"bos": 1, "eos": 0, **(roles or {})})
    for name, weight in model.state_dict().items():
        if (written := _gguf_name(name)) != leave_out:
            _add_tensor(writer, written, _as_llama_cpp(name, weight, config), quantized)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, pre: str, roles: dict[str, int]) -> None:
    kinds = [TokenType.CONTROL] * len(CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * (len(VOCABULARY) - len(kinds))])
    writer.add_token_merges(list(MERGES))
    for role, token in roles.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHATML)


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _as_llama_cpp(name: str, weight: torch.Tensor, config: LlamaConfig) -> np.ndarray:
    """Queries and keys lie there with the two components of each rotary pair side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for kind, count in heads.items():
        if kind in name:
            halves = weight.reshape(count, 2, -1, weight.shape[1])
            return halves.transpose(1, 2).reshape(weight.shape).numpy().copy()
    return weight.numpy().copy()


def _add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, quantized: bool) -> None:
    if quantized and weight.ndim == 2:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quants.quantize(weight, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, weight)
