"""What configs tell about a failed trial is true of the failure."""

from __future__ import annotations

import pytest

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
