"""One tiny model and an engine over it, shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from cacheblend_rag import BlendConfig, TieredKVStore, TransformersEngine
from cacheblend_rag.settings import LeadInConfig, names_of
from tests.models import make_model, make_tokenizer

EngineFactory = Callable[..., TransformersEngine]


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def make_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> EngineFactory:
    """Build an engine around the shared model; BlendConfig fields and engine arguments mix."""

    def make(
        *, store: TieredKVStore | None = None, with_model: Any = None, **arguments: Any
    ) -> TransformersEngine:
        names = ("instruction", "namespace", "registry", "lead_in")
        rest = {name: arguments.pop(name) for name in names if name in arguments}
        of_lead_in = {n: arguments.pop(n) for n in names_of(LeadInConfig) & arguments.keys()}
        if of_lead_in:
            rest["lead_in"] = LeadInConfig(**of_lead_in, **_kind(rest.get("lead_in")))
        config = BlendConfig(**{"min_tokens": 0, "selector": "random", **arguments})
        served = model if with_model is None else with_model
        return TransformersEngine(served, tokenizer=tokenizer, config=config, store=store, **rest)

    return make


def _kind(lead_in: Any) -> dict[str, Any]:
    return {} if lead_in is None else {"kind": lead_in}
