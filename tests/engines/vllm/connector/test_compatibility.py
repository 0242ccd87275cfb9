"""What is refused by name, before any model is tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig

from cacheblend_rag.engines.vllm.connector.compatibility import (
    check_attention,
    check_weights,
    refusal_of,
)
from cacheblend_rag.errors import UnsupportedModelError
from tests.models import SHAPE

GROUP = SimpleNamespace(kv_cache_spec=object(), layer_names=["layers.0"])


def vllm_config(**changes: Any) -> Any:
    """As much of a VllmConfig as is looked at; changes: group.field=value."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
        ),
        model_config=SimpleNamespace(is_moe=False, use_mla=False, hf_config=LlamaConfig(**SHAPE)),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        speculative_config=None,
        lora_config=None,
    )
    for name, value in changes.items():
        *group, field = name.split("__")
        setattr(getattr(config, group[0]) if group else config, field, value)
    return config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
        (
            {"parallel_config__data_parallel_size": 2, "model_config__is_moe": True},
            "data parallelism of experts",
        ),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"cache_config__cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
    ],
)
def test_what_cannot_be_blended_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    groups = SimpleNamespace(kv_cache_groups=[GROUP])
    assert refusal_of(vllm_config(), groups) is None
    assert said in str(refusal_of(vllm_config(**changes), groups))


def test_groups_of_kv_that_no_attention_has_are_refused() -> None:
    groups = SimpleNamespace(kv_cache_groups=[GROUP, GROUP])
    assert "KV cache groups of other kinds" in str(refusal_of(vllm_config(), groups))


def attention(**changes: Any) -> Any:
    """As much of an attention layer as is looked at."""
    plain: dict[str, Any] = {
        "impl": SimpleNamespace(sinks=None, alibi_slopes=None),
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_type": "encoder_only"}, "no causal attention"),
        ({"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}, "share KV"),
        ({"impl": SimpleNamespace(alibi_slopes=[0.5])}, "ALiBi"),
        ({"num_kv_heads": 4}, "different shapes"),
        ({"head_size_v": 128}, "different widths"),
    ],
)
def test_attention_of_another_kind_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    check_attention([attention(), attention()])
    with pytest.raises(UnsupportedModelError, match=said):
        check_attention([attention(), attention(**changes)])


def test_weights_that_are_loaded_by_a_function_around_a_layer_are_refused() -> None:
    check_weights([nn.Linear(1, 1)])
    offloaded = nn.Linear(1, 1)
    offloaded.forward = lambda given: given  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="offloaded weights cannot be blended"):
        check_weights([offloaded])
