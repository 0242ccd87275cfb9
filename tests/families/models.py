"""Every causal language model that the installed transformers can build, tiny and random.

A family is built from its config class: whatever TINY names and the class knows is made small.
Where that does not give a model that shows what is special to the family, CHANGES says what to
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import VOCABULARY, make_tokenizer

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
VLLM_HEAD = 64
"""Heads as wide as vLLM's kernels need them."""


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


def builders() -> dict[str, Callable[[], PreTrainedModel]]:
    """Return what builds each family's model, by name."""
    plain = {name: family.build for name, family in families().items()}
    return dict(sorted({**plain, **WITH_PICTURES}.items()))


def save_family(name: str, folder: Path) -> Path:
    """Save a family's random model and a tokenizer, in widths that vLLM's kernels take."""
    family = families()[name]
    known = family.config().to_dict()
    wide = {"head_dim", "global_head_dim", "moe_intermediate_size"}
    wide |= {"shared_expert_intermediate_size", "shared_intermediate_size"}
    more: dict[str, Any] = {key: VLLM_HEAD for key in wide if known.get(key)}
    heads = int(family.config().num_attention_heads)
    family.build(hidden_size=heads * VLLM_HEAD, **more).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def own_tokens(model: PreTrainedModel, ids: Tensor, count: int) -> list[int]:
    """Tokens that the model's own forward chooses, which reads the whole text for each."""
    start = ids.shape[1]
    for _ in range(count):
        best = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    return [int(token) for token in ids[0, start:]]
