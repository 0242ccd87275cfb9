"""Which models can be blended: tried in every precision, on models as they are and on faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_rag.engines.transformers import trial
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.trial import find_ordinary_prefill, open_stack
from cacheblend_rag.errors import UnsupportedModelError
from tests.families.models import Family
from tests.faulty_stacks import FAULTS
from tests.models import make_model

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("gemma3", torch.float16),
        ("qwen3-moe", torch.bfloat16),
    ],
    ids=str,
)
class TestInEveryPrecision:
    def test_a_model_passes_and_is_left_as_it_is(self, family: str, dtype: torch.dtype) -> None:
        model = make_model(family, dtype)
        before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
        assert all(open_stack(model).layouts or [None])
        after = {name: weight.data_ptr() for name, weight in model.named_parameters()}
        assert after == before
        assert {weight.dtype for weight in model.parameters()} == {dtype}

    @pytest.mark.parametrize("fault", FAULTS)
    def test_faults_are_refused(
        self, fault: str, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = make_model(family, dtype)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data += 0.3
        monkeypatch.setattr(trial, "TransformersStack", FAULTS[fault])
        with pytest.raises(UnsupportedModelError, match=r"keys of layer|run alone"):
            open_stack(model)


class WrongPositions(OrdinaryPrefill):
    """Decodes each token one position too far on."""

    def decode(self, cache: Any, token_ids: Any) -> torch.Tensor:
        return super().decode(cache, [*token_ids[:1], *token_ids])


class Forgetful(OrdinaryPrefill):
    """Decodes from the last token alone."""

    def decode(self, cache: Any, token_ids: Any) -> torch.Tensor:
        return self.prefill(token_ids[-1:], 4)[1]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_a_model_goes_on_from_what_was_kept_in_every_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("gemma3", dtype)
    opened = open_stack(model)
    assert find_ordinary_prefill(model, opened).cache_name == "past_key_values"
    for fault in (WrongPositions, Forgetful):
        monkeypatch.setattr(trial, "OrdinaryPrefill", fault)
        with pytest.raises(UnsupportedModelError, match="does not continue from its cached KV"):
            find_ordinary_prefill(model, opened)


# Queries scaled by their absolute position, as Ministral 3's are


def ministral(original: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
        "original_max_position_embeddings": original, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    return Family("ministral3", {"sliding_window": None, "rope_parameters": rope}).build().to(dtype)


@pytest.mark.parametrize(
    ("original", "dtype"), [(64, torch.float32), (8192, torch.bfloat16)], ids=str
)
def test_queries_that_are_scaled_by_position_are_refused(original: int, dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="depends on absolute positions beyond its rotary embedding: the queries of layer 0",
    ):
        open_stack(ministral(original, dtype))
