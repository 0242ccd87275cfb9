"""An engine is for the weights and adapters that it was opened with, and refuses others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from cacheblend_rag import Chunk, ConfigError, SamplingParams, TieredKVStore
from cacheblend_rag.engines.transformers import engine as engine_module
from cacheblend_rag.engines.transformers.batches import MODEL_CHANGED
from tests.engines.transformers.conftest import EngineFactory
from tests.models import make_model, prompt_of, words

CHUNKS = [Chunk(words(30, seed)) for seed in range(2)]
PROMPT = prompt_of("w5 w6", *CHUNKS, words(6, 99))
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
CONFIG = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def peft() -> Any:
    """A model with the adapters ``default``, which is in effect, and ``b``."""
    made = lora("default")
    made.add_adapter("b", CONFIG)
    return made.eval()


def lora(adapter: str) -> Any:
    model = make_model()
    torch.manual_seed(3)
    return get_peft_model(model, CONFIG, adapter_name=adapter).eval()


def weigh(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(factor)


def replace_a_weight(peft: Any) -> None:
    """By one that counts no writes."""
    norm = peft.base_model.model.model.norm
    with torch.inference_mode():
        norm.weight = nn.Parameter(0.9 * norm.weight, requires_grad=False)


def replace_a_module(peft: Any) -> None:
    mlp = peft.base_model.model.model.layers[1].mlp
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "another adapter": lambda peft: peft.set_adapter("b"),
    "an adapter merged": lambda peft: peft.merge_adapter(),
    "another scaling": lambda peft: [
        module.set_scale("default", 0.5)
        for module in peft.modules()
        if hasattr(module, "set_scale")
    ],
    "an adapter's weights": lambda peft: [
        weigh(module["default"], 2.0)
        for name, module in peft.named_modules()
        if name.endswith("lora_A")
    ],
    "weights elsewhere": lambda peft: [
        setattr(weight, "data", 0.9 * weight.data) for weight in peft.parameters()
    ],
    "a weight": replace_a_weight,
    "a module": replace_a_module,
    "adapters taken out": lambda peft: peft.unload(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_is_for_the_model_as_it_was_opened(
    change: str, peft: Any, make_engine: EngineFactory
) -> None:
    store = TieredKVStore.open()
    engine = make_engine(with_model=peft, store=store, recompute_ratio=0.0)
    engine.precompute(CHUNKS, progress=False)
    assert engine.generate(PROMPT, GREEDY).report.reused_tokens == 60
    CHANGES[change](peft)
    for ask in (engine.generate, engine.generate_full):
        with pytest.raises(ConfigError, match="or open another engine with it"):
            ask(PROMPT, GREEDY)
    assert engine.precompute(["w1 w2"], progress=False).refused == {MODEL_CHANGED: 1}
    anew = make_engine(with_model=peft, store=store, recompute_ratio=0.0)
    assert anew.fingerprint != engine.fingerprint
    assert anew.precompute(CHUNKS, progress=False).computed == 2
    reused = anew.generate(PROMPT, GREEDY)
    assert reused.report.reused_tokens == 60


def test_each_adapter_has_an_engine_which_answers_while_it_is_active(
    peft: Any, make_engine: EngineFactory
) -> None:
    store, told = TieredKVStore.open(), {}
    for name in ("b", "default"):
        peft.set_adapter(name)
        engine = make_engine(with_model=peft, store=store, recompute_ratio=0.0)
        engine.precompute(CHUNKS, progress=False)
        told[name] = engine, engine.generate(PROMPT, GREEDY).token_ids
    for name, (engine, wanted) in told.items():
        peft.set_adapter(name)
        answer = engine.generate(PROMPT, GREEDY)
        assert (answer.token_ids, answer.report.reused_tokens) == (wanted, 60)


def test_adapters_loaded_by_transformers_itself(make_engine: EngineFactory) -> None:
    model = make_model()
    plain = make_engine(with_model=model)
    torch.manual_seed(3)
    model.add_adapter(CONFIG, adapter_name="default")
    with pytest.raises(ConfigError, match="active adapters have changed"):
        plain.generate(PROMPT, GREEDY)
    other = make_model()
    torch.manual_seed(3)
    with_adapter = make_engine(with_model=model).fingerprint
    assert with_adapter == make_engine(with_model=get_peft_model(other, CONFIG)).fingerprint
    model.disable_adapters()
    assert make_engine(with_model=model).fingerprint != with_adapter


def test_what_is_computed_while_the_model_changes_is_not_stored(
    peft: Any, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(with_model=peft)
    compute = engine_module.compute_chunks

    def changing(*given: Any, **named: Any) -> Any:
        for item in compute(*given, **named):
            peft.set_adapter("b")
            yield item

    monkeypatch.setattr(engine_module, "compute_chunks", changing)
    report = engine.precompute(CHUNKS, progress=False)
    assert (report.computed, dict(report.refused)) == (0, {MODEL_CHANGED: 2})
    assert not list(engine.store.entries())
