"""Carries the weights of a trained toy over to another architecture, as a start for training.

What is named alike is copied. Weights that the Llama toy does not have, those of the norms of
queries, of keys and of what a layer adds, get the mean size that the Llama toy's values have on a
prompt of the corpus, so that the new model begins near to the old one.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.toy import CHUNK_SEPARATOR, EVALUATION_SHAPE, draw_documents

# silu(x) is close to gelu(x / GELU_SLOPE) * GELU_SLOPE.
GELU_SLOPE = 1.702


def adopt_weights(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Start a model from the weights in a folder, of the same architecture or of a Llama toy."""
    weights = load_file(folder / "model.safetensors")
    if set(weights) == set(model.state_dict()) - {"lm_head.weight"}:
        model.load_state_dict(weights, strict=False)
        return
    old = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    if old.config.model_type != "llama":
        raise ValueError(f"{folder} holds neither a {model.config.model_type} nor a llama")
    weights |= _head_norms(old, tokenizer)
    if model.config.model_type == "gemma3_text":
        weights = _as_gemma(weights, old, tokenizer)
    missing, _unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"}:
        raise ValueError(f"no start for {', '.join(missing)}")


def _head_norms(old: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Weights of the norms of queries and keys, one a head dimension."""
    width = old.config.head_dim
    sizes = _mean_sizes(old, tokenizer, "self_attn.q_proj", "self_attn.k_proj")
    return {
        f"model.layers.{layer}.self_attn.{name}_norm.weight": torch.full((width,), size)
        for layer, pair in enumerate(sizes)
        for name, size in zip("qk", pair, strict=True)
    }


def _as_gemma(
    weights: dict[str, Tensor], old: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Tensor]:
    """Gemma scales embeddings, adds 1 to a norm's weight and normalizes what a layer adds."""
    width = old.config.hidden_size
    added = _mean_sizes(old, tokenizer, "self_attn", "mlp")
    for number, (attention, feed_forward) in enumerate(added):
        layer = f"model.layers.{number}"
        before = weights.pop(f"{layer}.post_attention_layernorm.weight")
        weights[f"{layer}.pre_feedforward_layernorm.weight"] = before
        weights[f"{layer}.post_attention_layernorm.weight"] = torch.full((width,), attention)
        weights[f"{layer}.post_feedforward_layernorm.weight"] = torch.full((width,), feed_forward)
        weights[f"{layer}.mlp.gate_proj.weight"] /= GELU_SLOPE
        weights[f"{layer}.mlp.up_proj.weight"] *= GELU_SLOPE
    weights["model.embed_tokens.weight"] /= math.sqrt(width)
    weights["model.norm.weight"] *= math.sqrt(width)
    return {name: value - 1 if "norm" in name else value for name, value in weights.items()}


def _mean_sizes(
    old: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *names: str
) -> list[list[float]]:
    """Root mean square of what the named parts of each layer return on one prompt."""
    seen: dict[nn.Module, float] = {}

    def note(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        values = output[0] if isinstance(output, tuple) else output
        seen[module] = values.square().mean().sqrt().item()

    parts = [[layer.get_submodule(name) for name in names] for layer in old.model.layers]
    hooks = [part.register_forward_hook(note) for layer in parts for part in layer]
    documents, _ = draw_documents(random.Random(0), EVALUATION_SHAPE)
    text = CHUNK_SEPARATOR.join(document.text for document in documents)
    with torch.no_grad():
        old(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    for hook in hooks:
        hook.remove()
    return [[seen[part] for part in layer] for layer in parts]
