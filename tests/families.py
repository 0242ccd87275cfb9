"""Every causal language model that the installed transformers can build, tiny and random.

`python -m tests.families` tries them all on the embedded engine and prints a Markdown table, which
stands in docs/models.md; `--vllm` tries IN_VLLM in vLLM, `--dtype bfloat16` the families that are
blended in that precision, with outliers. Families by name: only these.

A family is built from its config class: whatever TINY names and the class knows is made small.
Where that does not give a model that shows what is special to the family, CHANGES says what to
change.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rotary import pair_sizes, rotated
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.compatibility import open_stack
from cacheblend_rag.engines.transformers.stack import TransformersStack
from tests.models import VOCABULARY, make_tokenizer, prompt_of, words

Found = TypeVar("Found")

LAYERS = 4
WINDOW = 48
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
TURNS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
WITHOUT = object()
"""Stands for a setting that is to be left as the config class has it."""

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # recurrences
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


OUTLYING_NORM, OUTLYING_EMBEDDING, OUTLYING_BIAS = 16.0, 10.0, 400.0
"""What ``with_outliers`` multiplies some weights by, and the largest bias of a key."""

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": TURNS}
DECODER: dict[str, Any] = {"is_decoder": True}

CHANGES: dict[str, dict[str, Any]] = {
    # what a family needs to be built small, or to show what is special to it
    "afmoe": {
        "route_norm": True,
        "sliding_window": WINDOW,
        "global_attn_every_n_layers": 2,
        "score_func": "sigmoid",
        "mup_enabled": True,
    },
    "axk1": {"num_key_value_heads": 4, "head_dim": WITHOUT},
    "axk2": {"num_key_value_heads": 4, "head_dim": WITHOUT},
    "bert": DECODER,
    "bert-generation": DECODER,
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "camembert": DECODER,
    "codegen": {"rotary_dim": 8},
    "cohere2": {"sliding_window": WINDOW},
    "cohere2_moe": MIXED,
    "ctrl": {"dff": 96},
    "cwm": {"sliding_window": WINDOW},
    "data2vec-text": DECODER,
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 16384,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": WITHOUT},
    "deepseek_v32": {"num_key_value_heads": 4, "index_topk": 4096},
    "dots1": MIXED,
    "electra": DECODER,
    "ernie": DECODER,
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 4},
    "exaone_moe": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "falcon_h1": {"mamba_n_heads": 4},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "layer_types": TURNS,
    },
    "gemma4_text": {
        **MIXED,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {**ROPE, "rope_theta": 1e6},
        },
    },
    "glm4_moe": {"head_dim": 16},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm_moe_dsa": {"num_key_value_heads": 4, "index_topk": 4096},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW},
    "gptj": {"rotary_dim": 8},
    "granite": MULTIPLIERS,
    "granite_swa": {**MULTIPLIERS, "sliding_window": WINDOW},
    "granitemoe": MULTIPLIERS,
    "granitemoe_swa": {**MULTIPLIERS, "sliding_window": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hyperclovax": MULTIPLIERS,
    "laguna": MIXED,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": WITHOUT},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 64, "intermediate_size_mlp": 96},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "megatron-bert": DECODER,
    "mellum": MIXED,
    "mimo_v2_flash": {
        **MIXED,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "minicpm3": {"num_key_value_heads": 4},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 32},
    "ministral": MIXED,
    "ministral3": {"sliding_window": None},
    "mistral": {"sliding_window": WINDOW},
    "modernbert-decoder": {"local_attention": 64, "global_attn_every_n_layers": 2},
    "nemotron_h": {
        "num_hidden_layers": WITHOUT,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo3": MIXED,
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "phimoe": {"sliding_window": WINDOW},
    "reformer": {**DECODER, "axial_pos_embds": False},
    "rembert": DECODER,
    "roberta": DECODER,
    "roberta-prelayernorm": DECODER,
    "roformer": DECODER,
    "rwkv": {"context_length": 2048},
    "smollm3": {"no_rope_layer_interval": 4},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 16},
    "xlm-roberta": DECODER,
    "xlm-roberta-xl": DECODER,
    "xlnet": {"d_head": 16},
    "youtu": {"num_key_value_heads": 4, "head_dim": WITHOUT},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # the same class in another dress
    "exaone4, one kind": (
        "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS},
    ),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "gemma3, linear": (
        "gemma3_text",
        {
            **MIXED, "query_pre_attn_scalar": 16, "rope_parameters": {"sliding_attention": ROPE,
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        },
    ),
    "gpt_neox, in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "granitemoehybrid, attention": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * LAYERS, "position_embedding_type": "rope"},
    ),
    "llama, dynamic": (
        "llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}},
    ),
    "llama, linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama, llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama, part of a head": (
        "llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    ),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0,
                "original_max_position_embeddings": 1024, "mscale": 0.7, "mscale_all_dim": 1.0,
            },
        },
    ),
    "llama4, full attention": (
        "llama4_text",
        {
            "layer_types": ["full_attention"] * LAYERS, "floor_scale": 64, "attn_scale": 0.5,
            "intermediate_size_mlp": 96,
        },
    ),
    "mixtral, window": ("mixtral", {"sliding_window": WINDOW}),
    "phi, norms": ("phi", {"num_key_value_heads": 4, "qk_layernorm": True}),
    "phi3, window": ("phi3", {"sliding_window": WINDOW}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8, "original_max_position_embeddings": 128, "factor": 32.0,
            },
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen2, mrope": ("qwen2", {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}),
    "qwen2, window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "smollm3, rotary": ("smollm3", {"no_rope_layers": [1] * LAYERS}),
    "stablelm, parallel": (
        "stablelm",
        {
            "num_key_value_heads": 4, "use_parallel_residual": True, "qk_layernorm": True,
            "use_qkv_bias": True,
        },
    ),
}  # fmt: skip

IN_VLLM = (
    "apertus", "arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "exaone_moe", "falcon",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
    "granite", "granitemoe", "helium", "hyperclovax", "llama", "llama, llama3", "llama, yarn",
    "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Families that are tried in vLLM."""


@dataclass(frozen=True)
class Family:
    """A config class by its model type, and settings that differ from TINY's."""

    model_type: str
    changes: Mapping[str, Any]

    def config(self, **more: Any) -> Any:
        """Return the config; more: further changes."""
        kind = CONFIG_MAPPING[self.model_type]
        known = {*_defaults(kind), *kind.attribute_map}
        settings = {name: value for name, value in TINY.items() if name in known}
        settings |= {**self.changes, **more}
        return kind(**{name: value for name, value in settings.items() if value is not WITHOUT})

    def build(self, **more: Any) -> PreTrainedModel:
        """Return the model, always the same one; norms, biases and sinks are not left at 0 or 1."""
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(self.config(**more))
        return stirred(model)


def _with_pictures(kind: str, **parts: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        config = getattr(transformers, f"{kind}Config")(**parts)
        torch.manual_seed(7)
        return stirred(getattr(transformers, f"{kind}ForConditionalGeneration")(config))

    return build


_TEXT: dict[str, Any] = {name: TINY[name] for name in list(TINY)[:14] if "per_layer" not in name}
_SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_MROPE: dict[str, Any] = {**_TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
_MARKS: dict[str, int] = {
    "image_token_id": 255, "video_token_id": 254, "vision_start_token_id": 253,
}  # fmt: skip
WITH_PICTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3, with pictures": _with_pictures(
        "Gemma3",
        text_config={**_TEXT, **MIXED, "query_pre_attn_scalar": 16},
        vision_config=_SIGHT,
        image_token_index=255,
        mm_tokens_per_image=4,
    ),
    "llava": _with_pictures(
        "Llava",
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_SIGHT, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=255,
    ),
    "mistral3": _with_pictures(
        "Mistral3",
        text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**_SIGHT, "model_type": "pixtral", "head_dim": 16},
        image_token_index=255,
    ),
    "qwen2_vl": _with_pictures(
        "Qwen2VL",
        text_config={name: value for name, value in _MROPE.items() if name != "head_dim"},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        **_MARKS,
    ),
    "qwen3_vl": _with_pictures(
        "Qwen3VL",
        text_config=_MROPE,
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1],
        },
        **_MARKS,
    ),
}  # fmt: skip


def families() -> dict[str, Family]:
    """Return all families by name, those of the tests among them."""
    plain = {
        name: Family(name, CHANGES.get(name, {})) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    return dict(sorted({**plain, **{n: Family(*found) for n, found in VARIANTS.items()}}.items()))


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with every weight random, so that leaving one out would show."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and (weight.dim() == 1 or float(weight.std()) < 1e-6):
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.1)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    return model.float().eval()


def with_outliers(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with outliers such as trained models have.

    Biases of keys grow to several hundred in the pairs that turn slowest, as Qwen2.5's do. In each
    norm a few weights are many times as large as the others, and some embeddings are.
    """
    draw = torch.Generator().manual_seed(13)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            _grow(weight.data, OUTLYING_NORM, draw)
        elif name.endswith("k_proj.bias"):
            _grow_slowest(weight.data.view(-1, _head_dim(model)))
    _grow(model.get_input_embeddings().weight.data.T, OUTLYING_EMBEDDING, draw)
    return model


def _grow(weights: Tensor, by: float, draw: torch.Generator) -> None:
    """Multiply a few of the weights, or of the rows of weights."""
    chosen = torch.randperm(len(weights), generator=draw)[: max(1, len(weights) // 32)]
    weights[chosen] *= by


def _grow_slowest(bias: Tensor) -> None:
    """bias: (kv_heads, head_dim), whose halves are pairs."""
    half = bias.shape[1] // 2
    bias[:, half - 1], bias[:, -1] = OUTLYING_BIAS, -OUTLYING_BIAS
    bias[:, half - 2] = OUTLYING_BIAS / 4


def _head_dim(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    named = getattr(config, "head_dim", None)
    return int(named or config.hidden_size // config.num_attention_heads)


def _defaults(kind: type[Any]) -> Iterable[str]:
    try:
        return kind().to_dict().keys()
    except Exception:
        return TINY


# What is measured

GREEDY = SamplingParams(max_tokens=16)
CHUNK_TOKENS = 90
MOVED_BY = (1, 511, 8192)
LOW_PROMPTS = range(1, 41, 5)
"""Seeds of the prompts that errors in 16 bits are averaged over: one alone is a matter of luck."""
LARGEST_MODEL = 60_000_000
SLOW = {"kimi_linear", "prophetnet"}
"""Their plain code on a CPU takes minutes for what is measured."""


@dataclass(frozen=True)
class Row:
    """What one family showed; differences are shares of the largest value compared.

    refusal: why it is not blended, or None. everything: of logits between a pass that recomputes
    all tokens and the model's own prefill. nothing: of logits when a chunk at position 0 is reused
    as it is stored. moved: of layer 0's keys, moved and computed in place. greedy: tokens of 16
    that are those of the model's own forward, which reads the whole text for each.
    """

    name: str
    refusal: str | None
    everything: float | None = None
    nothing: float | None = None
    moved: float | None = None
    greedy: int = 0

    def line(self) -> str:
        """Return a row of the table."""
        state = "blended" if self.refusal is None else f"refused: {self.refusal}"
        found = [
            "" if value is None else f"{value:.0e}"
            for value in (self.everything, self.nothing, self.moved)
        ]
        return f"| {self.name} | {state} | {' | '.join(found)} | {self.greedy}/16 |"


@dataclass(frozen=True)
class LowRow:
    """What one family showed in 16 bits, held against the same weights in float32.

    Errors are root mean squares of logits' differences from float32's, over some prompts, as
    shares of float32's logits' spread. refusal: why it is not blended, or None. own: of the model's
    own prefill. everything: of a pass that recomputes all tokens. nothing: of one that reuses a
    chunk at position 0 as it is stored. moved: the largest difference between layer 0's keys, moved
    by positions and computed there, of a pair of components as a share of its size.
    """

    name: str
    refusal: str | None
    own: float | None = None
    everything: float | None = None
    nothing: float | None = None
    moved: float | None = None

    def line(self) -> str:
        """Return a row of the table."""
        state = "blended" if self.refusal is None else f"refused: {self.refusal}"
        errors = (self.own, self.everything, self.nothing, self.moved)
        found = ["" if value is None else f"{value:.1e}" for value in errors]
        return f"| {self.name} | {state} | {' | '.join(found)} |"


@torch.no_grad()
def measure_low(name: str, model: PreTrainedModel, dtype: torch.dtype) -> LowRow:
    """Try one model in 16 bits, with outliers, on the prompt of ``measure``."""
    model = with_outliers(model).to(dtype)
    wide = deepcopy(model).float()
    tokenizer = make_tokenizer()
    engine = TransformersEngine(model, tokenizer=tokenizer, lead_in="none")
    if engine.blend_refusal is not None:
        return LowRow(name, engine.blend_refusal)
    everything, nothing, own = [], [], []
    for seed in LOW_PROMPTS:
        ids = torch.tensor(three_chunks(seed)[0].encode(tokenizer).token_ids)
        wanted = _own_logits(wide, ids)
        own.append(_error(_own_logits(model, ids), wanted))
        everything.append(_error(_blended_logits(engine, ids, 0, 1.0), wanted))
        nothing.append(_error(_blended_logits(engine, ids, CHUNK_TOKENS, 0.0), wanted))
    return LowRow(
        name,
        None,
        *(_together(errors) for errors in (own, everything, nothing)),
        moved=max(_moved_pairs(engine, ids[:CHUNK_TOKENS], by) for by in MOVED_BY),
    )


def _own_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, -1]
    return logits


def _together(errors: Sequence[float]) -> float:
    """Root mean square."""
    return float(torch.tensor(errors).square().mean().sqrt())


def _error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of a difference, but for what all tokens of the vocabulary share."""
    off = found.float() - wanted.float()
    return float((off - off.mean()).norm() / (wanted - wanted.mean()).float().norm())


def three_chunks(seed: int = 1) -> tuple[BlendPrompt, list[Chunk]]:
    """A prompt of three chunks, each longer than the families' windows, and the chunks."""
    chunks = [Chunk(words(CHUNK_TOKENS, seed + more)) for more in (1, 2, 3)]
    parts = (part for chunk in chunks for part in (chunk, " w9 "))
    return prompt_of(words(5, seed), *parts, "w5 w6"), chunks


@torch.no_grad()
def measure(name: str, model: PreTrainedModel) -> Row:
    """Try one model on a prompt of three chunks."""
    tokenizer = make_tokenizer()
    config = BlendConfig(recompute_ratio=1.0, min_tokens=0)
    engine = TransformersEngine(model, tokenizer=tokenizer, config=config, lead_in="none")
    prompt, chunks = three_chunks()
    engine.precompute(chunks, progress=False)
    answer = engine.generate(prompt, GREEDY)
    ids = torch.tensor([prompt.encode(tokenizer).token_ids])
    wanted = own_tokens(model, ids, 16)
    greedy = sum(a == b for a, b in zip(answer.token_ids, wanted, strict=False))
    if engine.blend_refusal is not None:
        return Row(name, engine.blend_refusal, greedy=greedy)
    assert answer.report.blended
    return Row(
        name,
        None,
        everything=_blended(engine, ids[0], 0, 1.0),
        nothing=_blended(engine, ids[0], CHUNK_TOKENS, 0.0),
        moved=max(_moved(engine, ids[0, :CHUNK_TOKENS], by) for by in MOVED_BY),
        greedy=greedy,
    )


def own_tokens(model: PreTrainedModel, ids: Tensor, count: int) -> list[int]:
    """Tokens that the model's own forward chooses, which reads the whole text for each."""
    start = ids.shape[1]
    for _ in range(count):
        best = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    return [int(token) for token in ids[0, start:]]


@lru_cache(1)
def stack_of(model: PreTrainedModel) -> TransformersStack:
    """A model as the engine drives it."""
    return open_stack(model)


def own_kv(engine: TransformersEngine, ids: Tensor, start: int = 0) -> FusedKV:
    """The model's own KV of these tokens, at positions from ``start``."""
    fused = FusedKV(stack_of(engine.model).geometry, ids.numel())
    positions = torch.arange(start, start + ids.numel())[None]
    engine.model(
        input_ids=ids[None],
        position_ids=positions,
        past_key_values=FusedCache(fused, 0),
        use_cache=True,
    )
    return fused


def _blended(engine: TransformersEngine, ids: Tensor, cached: int, ratio: float) -> float:
    """Difference of logits when the KV of the first ``cached`` tokens is there already."""
    wanted = _own_logits(engine.model, ids)
    return _difference(_blended_logits(engine, ids, cached, ratio), wanted)


def _blended_logits(engine: TransformersEngine, ids: Tensor, cached: int, ratio: float) -> Tensor:
    stack = stack_of(engine.model)
    fused = FusedKV(stack.geometry, ids.numel())
    known = Candidates.none(ids.numel())
    if cached:
        own = own_kv(engine, ids[:cached])
        fused.keys[:, :, :cached], fused.values[:, :, :cached] = own.keys, own.values
        known.cached[:cached] = True
    config = BlendConfig(selector="random", recompute_ratio=ratio)
    schedule = plan_schedule(config, stack.geometry.layers)
    run = BlendPass(stack, ids, fused, known, schedule, row_block=97)
    run.run()
    return stack.logits(run.hidden)[0]


def _moved(engine: TransformersEngine, ids: Tensor, by: int) -> float:
    here, there = own_kv(engine, ids).keys[:1], own_kv(engine, ids, by).keys[:1]
    return _difference(rotated(here, stack_of(engine.model).rotation(by).of(0)), there)


def _moved_pairs(engine: TransformersEngine, ids: Tensor, by: int) -> float:
    """How far a pair of key components is off, as a share of its size."""
    here, there = own_kv(engine, ids).keys[:1], own_kv(engine, ids, by).keys[:1]
    turn = stack_of(engine.model).rotation(by).of(0)
    off, size = (pair_sizes(part.float(), turn) for part in (rotated(here, turn) - there, there))
    return float((off / size.clamp(min=0.01 * float(size.median()))).max())


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


# The command


def builders() -> dict[str, Callable[[], PreTrainedModel]]:
    """Return what builds each family's model, by name."""
    plain = {name: family.build for name, family in families().items()}
    return dict(sorted({**plain, **WITH_PICTURES}.items()))


def try_all(
    names: Iterable[str], measure: Callable[[str, PreTrainedModel], Found] = measure
) -> Iterator[Found | Row | tuple[str, str]]:
    """Measure families; of one that cannot be built or run at all, its name and why."""
    build = builders()
    for name in names:
        try:
            if name in families():
                _check_size(families()[name])
            model = build[name]()
            model(input_ids=torch.arange(2, 12)[None], use_cache=False)
        except Exception as error:
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        try:
            yield measure(name, model)
        except Exception as error:
            line = str(error).splitlines()[0] if str(error) else ""
            yield Row(name, f"FAILED, {type(error).__name__}: {line}")


def _check_size(family: Family) -> None:
    if family.model_type in SLOW:
        raise ValueError("it takes minutes on a CPU")
    config = family.config()
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise ValueError("made of several models: it is tried by its part that reads text")
    with torch.device("meta"):
        weights = sum(w.numel() for w in AutoModelForCausalLM.from_config(config).parameters())
    if weights > LARGEST_MODEL:
        raise ValueError(f"{weights:,} weights, although it was made as small as is known how")


def print_embedded(names: Sequence[str]) -> None:
    """Try families on the embedded engine and print the table."""
    rows, left = [], []
    for found in tqdm(try_all(names), total=len(names)):
        (rows if isinstance(found, Row) else left).append(found)
    blended = sum(row.refusal is None for row in rows)
    print(
        f"{blended} of {len(rows)} families are blended (transformers "
        f"{transformers.__version__}):\n"
    )
    print("| family | on the embedded engine | ratio 1 | ratio 0 | moved keys | greedy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row.line())
    print("\nNot tried:\n")
    for name, why in left:
        print(f"- {name}: {why}")


def print_low(names: Sequence[str], dtype: torch.dtype) -> None:
    """Try families in 16 bits, with outliers, and print the table of those that are blended."""
    in_low = partial(measure_low, dtype=dtype)
    rows = list(tqdm(try_all(names, in_low), total=len(names)))
    blended = [row for row in rows if isinstance(row, LowRow) and row.refusal is None]
    print(f"{len(blended)} of {len(rows)} families are blended:\n")
    print("| family | own | ratio 1 | ratio 0 | moved keys |")
    print("| --- | --- | --- | --- | --- |")
    for row in blended:
        print(row.line().replace(" blended |", ""))
    print("\nOthers:\n")
    for row in rows:
        if isinstance(row, tuple):
            print(f"- {row[0]}: {row[1]}")
        elif row.refusal is not None:
            print(f"- {row.name}: {row.refusal}")


def print_in_vllm(names: Sequence[str]) -> None:
    """Try families in vLLM, each in a process of its own, and print the table."""
    print("| family | in vLLM | ratio 1 | ratio 0 |")
    print("| --- | --- | --- | --- |")
    for name in tqdm(names):
        run = subprocess.run(
            [sys.executable, "-m", "tests.engines.vllm.one_family", name],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = run.stdout.splitlines() or ["{}"]
        found = json.loads(lines[-1]) if lines[-1].startswith("{") else {}
        state = "blended" if "everything" in found else f"refused: {found.get('refusal')}"
        if not found or "failed" in found:
            state = f"FAILED: {found.get('failed', 'the process ended')}"
        values = [f"{found[key]:.0e}" if key in found else "" for key in ("everything", "nothing")]
        print(f"| {name} | {state} | {' | '.join(values)} |", flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="families to try, all by default")
    parser.add_argument("--vllm", action="store_true", help="try them in vLLM")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="precision on the embedded engine; in 16 bits with outliers",
    )
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if asked.vllm:
        print_in_vllm(asked.names or IN_VLLM)
    elif asked.dtype != "float32":
        print_low(asked.names or list(builders()), getattr(torch, asked.dtype))
    else:
        print_embedded(asked.names or list(builders()))


if __name__ == "__main__":
    main()
