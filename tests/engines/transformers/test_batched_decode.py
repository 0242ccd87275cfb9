"""Texts that are decoded together get the logits, and the KV, that each gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag.engines.transformers.ordinary_prefill import (
    FusedCache,
    OrdinaryPrefill,
    decode_batch,
)
from cacheblend_rag.engines.transformers.trial import find_ordinary_prefill, open_stack
from tests.families.models import builders
from tests.models import make_model

LENGTHS = (90, 17, 55)
"""Tokens of the texts; the window of the models that have one is 48."""
STEPS = 12
TINY = ("llama", "mistral-sliding", "qwen3-moe", "gemma3")
BUILT = ("gpt_neox", "gpt_oss")


def built(family: str) -> PreTrainedModel:
    return make_model(family) if family in TINY else builders()[family]()


def prefilled(way: OrdinaryPrefill, texts: list[list[int]]) -> list[FusedCache]:
    """The caches of all texts but for their last tokens; room for some of those to come."""
    made: list[Any] = [way.prefill(ids, STEPS // 2)[0] for ids in texts]
    return made


def texts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(2, 250, (length,), generator=draw).tolist() for length in lengths]


def run(way: OrdinaryPrefill, *, together: bool) -> tuple[Tensor, list[FusedCache]]:
    """Decode the same tokens after each text; returns logits (steps, texts, vocabulary)."""
    texts = texts_of(LENGTHS)
    following = texts_of((STEPS,) * len(LENGTHS))
    caches = prefilled(way, texts)
    found = []
    for step in range(STEPS):
        for ids, new in zip(texts, following, strict=True):
            ids.append(new[step])
        if together:
            assert way.stack is not None
            found.append(decode_batch(way.stack, caches, [ids[-1] for ids in texts]))
        else:
            found.append(torch.cat([way.decode(*one) for one in zip(caches, texts, strict=True)]))
    return torch.stack(found), caches


@pytest.mark.parametrize("family", [*TINY, *BUILT])
@torch.no_grad()
def test_texts_decoded_together_get_the_logits_of_each_alone(family: str) -> None:
    model = built(family)
    way = find_ordinary_prefill(model, open_stack(model))
    assert way.decodes_batches
    found, caches = run(way, together=True)
    wanted, alone = run(way, together=False)
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(off.max()) < 1e-4
    for cache, own, length in zip(caches, alone, LENGTHS, strict=True):
        tokens = length + STEPS
        assert cache.get_seq_length() == own.get_seq_length() == tokens
        for name in ("keys", "values"):
            mine, its = (getattr(one.fused, name)[:, :, :tokens] for one in (cache, own))
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_model_that_computes_something_else_in_batches_is_found_out() -> None:
    model = make_model("llama")

    def depends(_: Any, given: tuple[Tensor, ...]) -> Tensor:
        return given[0] + 0.1 * (given[0].shape[0] - 1)

    model.model.layers[1].mlp.register_forward_pre_hook(depends)
    way = find_ordinary_prefill(model, open_stack(model))
    assert not way.decodes_batches


def refuse(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@torch.no_grad()
def test_a_step_that_fails_leaves_the_kv_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    stack = open_stack(model)
    way = OrdinaryPrefill(model, stack)
    texts = texts_of(LENGTHS)
    caches = prefilled(way, texts)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[2].mlp, "forward", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            decode_batch(stack, caches, [5, 6, 7])
    assert [cache.get_seq_length() for cache in caches] == list(LENGTHS)
    assert {layer.get_seq_length() for layer in caches[0].layers} == {LENGTHS[0]}
    again = decode_batch(stack, caches, [5, 6, 7])
    fresh = decode_batch(stack, prefilled(way, texts), [5, 6, 7])
    assert torch.equal(again, fresh)
