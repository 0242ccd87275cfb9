"""KV is stored apart for each adapter, weight and setting in effect, also when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.labels import labels_in
from cacheblend_rag.engines.transformers import engine as engine_module
from cacheblend_rag.engines.transformers import watched_model
from cacheblend_rag.engines.transformers.batches import MODEL_CHANGED
from tests.engines.transformers.conftest import EngineFactory
from tests.models import make_model, make_tokenizer, prompt_of, words

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


def swap(model: nn.Module) -> None:
    """Put other values into the weights, as a training loop or a hub of models does."""
    other = {name: 0.9 * weight for name, weight in model.state_dict().items()}
    model.load_state_dict(other)


def replace_a_weight(peft: Any) -> None:
    """By one that counts no writes."""
    norm = peft.base_model.model.model.norm
    with torch.inference_mode():
        norm.weight = nn.Parameter(0.9 * norm.weight, requires_grad=False)


def add_a_buffer(peft: Any) -> None:
    norm = peft.base_model.model.model.norm
    norm.register_buffer("kept", torch.ones(2))


def replace_a_module(peft: Any) -> None:
    mlp = peft.base_model.model.model.layers[1].mlp
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "another adapter": lambda peft: peft.set_adapter("b"),
    "both adapters": lambda peft: peft.base_model.set_adapter(["default", "b"]),
    "no adapter": lambda peft: peft.base_model.disable_adapter_layers(),
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
    "all weights": swap,
    "weights elsewhere": lambda peft: [
        setattr(weight, "data", 0.9 * weight.data) for weight in peft.parameters()
    ],
    "a weight": replace_a_weight,
    "a buffer": add_a_buffer,
    "a module": replace_a_module,
    "adapters taken out": lambda peft: peft.unload(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_living_engine_goes_by_the_model_as_it_is(
    change: str, peft: Any, make_engine: EngineFactory
) -> None:
    store = TieredKVStore.open()
    engine = make_engine(with_model=peft, store=store, recompute_ratio=0.0)
    engine.precompute(CHUNKS, progress=False)
    before = engine.fingerprint
    assert engine.generate(PROMPT, GREEDY).report.reused_tokens == 60
    CHANGES[change](peft)
    missed = engine.generate(PROMPT, GREEDY)
    assert {chunk.reason for chunk in missed.report.chunks} == {"other model"}
    assert missed.token_ids == engine.generate_full(PROMPT, GREEDY).token_ids
    assert engine.fingerprint != before
    assert engine.precompute(CHUNKS, progress=False).computed == 2
    anew = make_engine(with_model=peft, recompute_ratio=0.0)
    anew.precompute(CHUNKS, progress=False)
    reused = engine.generate(PROMPT, GREEDY)
    assert reused.report.reused_tokens == 60
    assert reused.token_ids == anew.generate(PROMPT, GREEDY).token_ids
    assert engine.fingerprint == anew.fingerprint


def test_changing_back_finds_what_was_stored(
    peft: Any, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    open_stack = watched_model.open_stack

    def noted(*arguments: Any) -> Any:
        tried.append(peft.active_adapter)
        return open_stack(*arguments)

    monkeypatch.setattr(watched_model, "open_stack", noted)
    engine = make_engine(with_model=peft, recompute_ratio=0.0)
    engine.precompute(CHUNKS, progress=False)
    first = engine.generate(PROMPT, GREEDY)
    peft.set_adapter("b")
    assert engine.generate(PROMPT, GREEDY).report.reused_tokens == 0
    peft.set_adapter("default")
    again = engine.generate(PROMPT, GREEDY)
    assert again.report.reused_tokens == 60
    assert again.token_ids == first.token_ids
    assert tried == ["default", "b"], "it is not tried again"


def test_an_adapter_is_known_by_what_it_is(peft: Any, make_engine: EngineFactory) -> None:
    """Not by its name, nor by what else is loaded; without one, the model is the plain one."""
    with_two = make_engine(with_model=peft).fingerprint
    peft.delete_adapter("b")
    assert make_engine(with_model=peft).fingerprint == with_two
    renamed = lora("legal")
    assert make_engine(with_model=renamed).fingerprint == with_two
    plain = make_engine(with_model=make_model()).fingerprint
    assert plain != with_two
    with peft.disable_adapter():
        assert make_engine(with_model=peft).fingerprint == plain


def test_adapters_loaded_by_transformers_itself(make_engine: EngineFactory) -> None:
    model = make_model()
    engine = make_engine(with_model=model, recompute_ratio=0.0)
    engine.precompute(CHUNKS, progress=False)
    plain = engine.fingerprint
    torch.manual_seed(3)
    model.add_adapter(CONFIG, adapter_name="default")
    assert engine.generate(PROMPT, GREEDY).report.reused_tokens == 0
    other = make_model()
    torch.manual_seed(3)
    assert engine.fingerprint == make_engine(with_model=get_peft_model(other, CONFIG)).fingerprint
    model.disable_adapters()
    assert engine.fingerprint == plain
    assert engine.generate(PROMPT, GREEDY).report.reused_tokens == 60


def test_a_prompt_prepared_before_the_change_is_served_by_the_model_as_it_is(
    peft: Any, make_engine: EngineFactory
) -> None:
    engine = make_engine(with_model=peft, recompute_ratio=0.0)
    engine.precompute(CHUNKS, progress=False)
    answer = engine.stream(PROMPT, GREEDY)
    peft.set_adapter("b")
    *_, last = answer
    assert last.generation is not None
    assert last.generation.report.reused_tokens == 0


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


def test_no_thread_works_with_new_adapters_under_the_old_fingerprint(
    peft: Any, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(with_model=peft)
    identify, begun, asked = engine._identify, threading.Event(), threading.Event()

    def slow(identity: Any) -> None:
        begun.set()
        asked.wait(0.5)
        identify(identity)

    monkeypatch.setattr(engine, "_identify", slow)
    before = engine.fingerprint
    peft.set_adapter("b")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: engine.fingerprint)
        assert begun.wait(10)
        second = engine.fingerprint
        asked.set()
    assert second == first.result() != before


def test_a_document_is_forgotten_under_all_adapters(peft: Any, make_engine: EngineFactory) -> None:
    from cacheblend_rag import Document

    engine = make_engine(with_model=peft)
    for adapter in ("default", "b"):
        peft.set_adapter(adapter)
        engine.precompute([Document("d", ("w1 w2", "w3 w4"))], progress=False)
    assert len(list(engine.store.entries())) == 4
    assert engine.evict_document("d") == 2, "a chunk counts once"
    assert not list(engine.store.entries())


def test_kv_of_every_adapter_and_lead_in_is_labelled_with_the_model(
    peft: Any, tmp_path: Path
) -> None:
    with closing(open_engine(model=peft, tokenizer=make_tokenizer(), kv_path=tmp_path)) as engine:
        engine.precompute(CHUNKS, progress=False)
        peft.set_adapter("b")
        engine.precompute(CHUNKS, progress=False)
        engine.sibling(lead_in="none").precompute(CHUNKS, progress=False)
        stored = {key.fingerprint for key in cast(Any, engine).store.entries()}
        assert len(stored) == 3
        labels = labels_in(tmp_path)
        assert stored == set(labels)
        assert {label.model for label in labels.values()} == {engine.model_name}
        assert sorted(label.lead_in.kind for label in labels.values())[-1] == "none"


def test_a_sibling_sees_the_change_too(peft: Any, make_engine: EngineFactory) -> None:
    engine = make_engine(with_model=peft)
    sibling = engine.sibling(lead_in="none")
    before = sibling.fingerprint
    peft.set_adapter("b")
    assert engine.fingerprint
    assert sibling.fingerprint not in (before, engine.fingerprint)
