"""What configs tell about a failed trial is true of the failure."""

from __future__ import annotations

import pytest
from transformers import Qwen2Config

from cacheblend_rag import TransformersEngine
from cacheblend_rag.engines.model_files import KEYS_CANNOT_BE_MOVED, explained
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.reason import ReasonCode
from tests.families.models import Family, families
from tests.models import make_tokenizer

SHAPES = UnsupportedModelError("layers of different shapes")
MOVED = UnsupportedModelError(f"its {KEYS_CANNOT_BE_MOVED}", ReasonCode.UNSUPPORTED_POSITIONS)
GEMMA4 = {**families()["gemma4_text"].changes, "global_head_dim": 32}


def refusal(family: Family) -> str | None:
    return TransformersEngine(family.build(), tokenizer=make_tokenizer()).blend_refusal


def test_rotary_settings_explain_only_keys_that_cannot_be_moved() -> None:
    """Gemma 4's proportional rotary is blended where all layers have one shape."""
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    odd = Family("gemma4_text", {**GEMMA4, "rope_parameters": {**kinds, "full_attention": rope}})
    assert refusal(odd) == "layers of different shapes"


def test_what_sees_later_pictures_only_is_not_told_of_text() -> None:
    config = families()["gemma4_unified_text"].config(use_bidirectional_attention="vision")
    assert explained(config, SHAPES) == "layers of different shapes"
    config.use_bidirectional_attention = "all"
    assert explained(config, SHAPES).startswith("bidirectional attention cannot be blended")


def test_mrope_is_no_reason_where_text_is_read() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    assert explained(Qwen2Config(rope_parameters=rope), SHAPES) == "layers of different shapes"


def test_attention_is_not_among_the_layers_that_cannot_be_blended() -> None:
    changes = dict(families()["nemotron_h"].changes)
    changes["layers_block_type"] = ["attention", "mlp", "attention", "mlp"]
    told = str(refusal(Family("nemotron_h", changes)))
    assert told.startswith("layers of type mlp cannot be blended: layer 1")


@pytest.mark.parametrize(
    ("family", "error", "code"),
    [
        ("bloom", SHAPES, ReasonCode.UNSUPPORTED_POSITIONS),
        ("nemotron_h", SHAPES, ReasonCode.UNSUPPORTED_LAYERS),
        ("llama", KeyError("x"), ReasonCode.UNSUPPORTED_LAYERS),
        ("llama", MOVED, ReasonCode.UNSUPPORTED_POSITIONS),
        ("llama", ConfigError("x"), ReasonCode.UNSUPPORTED_MODEL),
        ("deepseek_v3", SHAPES, ReasonCode.UNSUPPORTED_ATTENTION),
    ],
)
def test_a_refusal_has_the_code_of_what_explains_it(
    family: str, error: Exception, code: ReasonCode
) -> None:
    assert explained(families()[family].config(), error).code is code
