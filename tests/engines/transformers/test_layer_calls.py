"""What a model passes to its layers is recorded by name, however it passes it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from cacheblend_rag.engines.transformers.interception import DRIVEN, Interception
from cacheblend_rag.engines.transformers.layer_calls import LayerCalls

LLAMA = LlamaConfig(
    num_hidden_layers=3,
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=8,
)
GPT2 = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=8, n_positions=16)


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    """Llama passes all but the hidden states by name, GPT-2 most by position."""
    made: Any = LlamaForCausalLM(LLAMA) if request.param == "llama" else GPT2LMHeadModel(GPT2)
    return made.eval()


def test_arguments_are_those_of_the_layers_own_signature(model: Any) -> None:
    calls = LayerCalls(model, Interception(model))
    positions, blank = torch.tensor([[0, 1, 2]]), torch.zeros(1, 1, 16)
    seen: list[dict[str, Any]] = []

    def bound(_: Any, given: tuple[Any, ...], named: dict[str, Any], *__: Any) -> None:
        layer = type(calls.layers[0])
        found = dict(inspect.signature(layer.forward).bind(None, *given, **named).arguments)
        found |= found.pop("kwargs", {})
        seen.append(dict(list(found.items())[2:]))

    hooks = [layer.register_forward_hook(bound, with_kwargs=True) for layer in calls.layers]
    with torch.no_grad(), calls._interception.implementation("eager"):
        calls.decoder(inputs_embeds=blank.expand(1, 3, -1), position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        recorded = calls.arguments(positions, blank, DRIVEN)
    assert [set(one) for one in recorded] == [set(one) for one in seen]
    for ours, own in zip(recorded, seen, strict=True):
        for name in set(own) - {"attention_mask", "past_key_values"}:
            torch.testing.assert_close(ours[name], own[name], rtol=0, atol=0)


def test_layers_and_configs_are_as_before_afterwards(model: Any) -> None:
    calls = LayerCalls(model, Interception(model))
    own = calls.layers[1].forward
    calls.layers[1].forward = own  # as a hook's of a model spread over devices
    before = model.config._attn_implementation
    with torch.no_grad():
        assert calls.embed(torch.tensor([[1, 2]])).shape == (1, 2, 16)
        calls.arguments(torch.tensor([[0, 1]]), torch.zeros(1, 1, 16))
    assert model.config._attn_implementation == before != DRIVEN
    assert [vars(layer).get("forward") for layer in calls.layers] == [None, own, None]
    with calls._interception.implementation(DRIVEN):
        assert model.config._attn_implementation == DRIVEN
    with calls.replaced({0: lambda *_, **__: "replaced"}):
        assert calls.layers[0]() == "replaced"


def test_hidden_states_are_found_by_position_and_by_name(model: Any) -> None:
    calls = LayerCalls(model, Interception(model))
    hidden = torch.zeros(1, 2, 16)
    assert calls.hidden_in(0, (hidden, None), {}) is hidden
    assert calls.hidden_in(0, (), {"use_cache": False, "hidden_states": hidden}) is hidden
