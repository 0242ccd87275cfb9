"""Models in wrappers, compiled, or spread over devices are blended, or it is said why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from cacheblend_rag import Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.engines.transformers.trial import open_stack
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from tests.engines.transformers.conftest import EngineFactory
from tests.families.models import own_tokens
from tests.models import make_model, make_tokenizer, prompt_of, words

CHUNKS = [Chunk(words(30, seed)) for seed in range(3)]
PROMPT = prompt_of("w5 w6", *CHUNKS, words(6, 99))
TOKENS = 8
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def lora() -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return get_peft_model(make_model(), config).eval()


def layer_by_layer() -> nn.Module:
    model = make_model()
    layers = model.model.layers
    layers[0].compile(backend="eager")
    layers[1] = torch.compile(layers[1], backend="eager")
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    return model


WRAPPED = {
    "PEFT": lora,
    "accelerate, hooks": lambda: dispatch_model(make_model(), {"": "cpu"}, force_hooks=True),
    "compiled": lambda: torch.compile(make_model(), backend="eager"),
    "compiled layers": layer_by_layer,
    "compiled PEFT": lambda: torch.compile(lora(), backend="eager"),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_is_blended_as_it_computes_itself(
    kind: str, make_engine: EngineFactory
) -> None:
    plain = lora().base_model.model if "PEFT" in kind else make_model()
    ids = torch.tensor([PROMPT.encode(make_tokenizer()).token_ids])
    with torch.no_grad():
        wanted = own_tokens(plain, ids, TOKENS)
    engine = make_engine(with_model=WRAPPED[kind](), recompute_ratio=1.0)
    assert engine.blend_refusal is None
    assert engine.precompute(CHUNKS, progress=False).computed == 3
    answer = engine.generate(PROMPT, GREEDY)
    assert all(chunk.hit for chunk in answer.report.chunks)
    assert list(answer.token_ids) == wanted
    assert engine.generate_full(PROMPT, GREEDY).token_ids == answer.token_ids
    assert engine.fingerprint == make_engine(with_model=plain).fingerprint


def test_other_modules_are_refused_in_one_line() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned, tokenizer = get_peft_model(make_model(), config), make_tokenizer()
    with pytest.raises(ConfigError, match=r"else than the model in it \(PromptTuningConfig\)"):
        TransformersEngine(tuned, tokenizer=tokenizer)
    for other in (nn.Linear(2, 2), nn.Sequential(make_model())):
        with pytest.raises(ConfigError, match="is not a Hugging Face model: give a causal"):
            TransformersEngine(other, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="tokenizer must be given"):
        TransformersEngine(torch.compile(make_model()))


def test_layers_on_several_devices_are_told_by_name() -> None:
    model = make_model()
    layer = model.model.layers[2].to("meta")
    add_hook_to_module(layer, AlignDevicesHook(execution_device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"^layers on several devices \(cpu, meta\)$"):
        open_stack(model)


def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(make_model().config)
    for model in (empty, cpu_offload(make_model())):
        with pytest.raises(ConfigError, match="has weights that are not in memory"):
            TransformersEngine(model, tokenizer=make_tokenizer())
