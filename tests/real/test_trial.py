"""The trial of pretrained models at load: as they are, and driven wrongly in one thing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag.engines.transformers import trial
from cacheblend_rag.engines.transformers.loading import prepare
from cacheblend_rag.engines.transformers.trial import find_ordinary_prefill, open_stack
from cacheblend_rag.errors import UnsupportedModelError
from tests.faulty_stacks import FAULTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["smollm2_folder", "gemma3_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def model(folder: Path, request: pytest.FixtureRequest) -> PreTrainedModel:
    return prepare(AutoModelForCausalLM.from_pretrained(folder, dtype=request.param))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_real_model_passes(model: PreTrainedModel, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    stack = open_stack(model)
    assert all(layout is not None for layout in stack.layouts or [None])
    ordinary = find_ordinary_prefill(model, stack)
    assert ordinary.cache_name == "past_key_values"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(
    model: PreTrainedModel, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TransformersStack", FAULTS[fault])
    with pytest.raises(UnsupportedModelError, match=r"keys of layer|run alone"):
        open_stack(model)
