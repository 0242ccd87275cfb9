"""The cache that decoding goes on from: what each layer attends to, and that no step copies it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.trial import open_stack
from tests.models import make_model

WINDOW = 48
"""Of mistral-sliding, gemma2 and gemma3 in tests/models.py."""


def filled(tokens: int, windows: list[int | None] | None) -> FusedCache:
    geometry = Geometry(2, 4, 2, 8, torch.float32, torch.device("cpu"))
    fused = FusedKV(geometry, tokens, reserve=4)
    fused.keys.normal_()
    fused.values.normal_()
    return FusedCache(fused, tokens, windows)


def step(cache: FusedCache, layer: int, tokens: int = 1) -> tuple[Tensor, Tensor]:
    new = torch.randn(1, 2, tokens, 8)
    keys, values = cache.update(new, -new, layer)
    assert torch.equal(keys[:, :, -tokens:], new)
    assert torch.equal(values[:, :, -tokens:], -new)
    return keys, values


def test_a_layer_with_a_window_attends_to_the_tokens_in_it() -> None:
    cache = filled(20, [None, 8])
    assert cache.is_sliding == [False, True]
    for length in (20, 21, 22):
        assert cache.get_mask_sizes(1, 0) == (length + 1, 0)
        assert cache.get_mask_sizes(1, 1) == (8, length - 7)
        for layer, count in ((0, length + 1), (1, 8)):
            keys, values = step(cache, layer)
            assert keys.shape[2] == values.shape[2] == count
            own = cache.fused.keys[layer, None, :, length + 1 - count : length + 1]
            assert torch.equal(keys, own)
            assert keys.data_ptr() == own.data_ptr(), "not copied"
    assert cache.get_seq_length(1) == 23


def test_several_tokens_at_once_each_have_their_window() -> None:
    cache = filled(20, [None, 8])
    assert cache.get_mask_sizes(3, 1) == (10, 13)
    assert step(cache, 1, tokens=3)[0].shape[2] == 10
    short = filled(4, [None, 8])
    assert short.get_mask_sizes(1, 1) == (5, 0)
    assert step(short, 1)[0].shape[2] == 5


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma2", "gemma3"])
@torch.no_grad()
def test_decoding_reads_a_window_and_says_what_the_whole_text_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    stack = open_stack(model)
    ids = torch.randint(2, 250, (90,), generator=torch.Generator().manual_seed(4)).tolist()
    way = OrdinaryPrefill(model, stack)
    cache, _ = way.prefill(ids[:80], 10)
    assert isinstance(cache, FusedCache)
    read: dict[int, list[int]] = {layer: [] for layer in range(stack.geometry.layers)}
    for layer in cache.layers:
        watch(layer, read, monkeypatch)
    for end in range(81, 91):
        found = way.decode(cache, ids[:end])
        wanted = model(input_ids=torch.tensor([ids[:end]]), use_cache=False).logits[:, -1]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    for layer, window in enumerate(stack.windows):
        assert read[layer] == ([WINDOW] * 10 if window else list(range(81, 91)))


def watch(layer: Any, read: dict[int, list[int]], patch: pytest.MonkeyPatch) -> None:
    own = layer.update

    def update(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        keys, values = own(*given, **named)
        read[layer.layer].append(keys.shape[2])
        return keys, values

    patch.setattr(layer, "update", update)
