"""What rounding may change: measured by noise, and held against differences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rounding import NOISY_COPIES, beyond_rounding, layer_noise
from cacheblend_rag.blend.rows import Rows
from tests.blend.fake_stack import HIDDEN, FakeStack

ROWS = 12


def noise_of(stack: FakeStack, hidden: Tensor, **settings: float) -> Tensor:
    fused = FusedKV(stack.geometry, 20)
    draw = torch.Generator().manual_seed(1)
    fused.keys.normal_(generator=draw)
    fused.values.normal_(generator=draw)
    rows = Rows.at(np.arange(20 - ROWS, 20), torch.device("cpu"))
    return layer_noise(stack, 1, hidden, rows=rows, fused=fused, **settings)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_layers_noise_is_as_large_as_its_type_rounds() -> None:
    hidden = normal(1, ROWS, HIDDEN)
    noise = noise_of(FakeStack(), hidden)
    assert noise.shape == (NOISY_COPIES, 1, ROWS, HIDDEN)
    assert not torch.equal(noise[0], noise[1])
    eps = torch.finfo(torch.float32).eps
    assert 0.3 * eps < float(noise.square().mean().sqrt()) < 10 * eps
    eight = noise_of(FakeStack(), hidden, cache_step=0.125)
    assert 0.01 < float(eight.square().mean().sqrt()) < 0.1


def test_neither_outliers_nor_a_few_tokens_hide_a_difference() -> None:
    noise = 0.01 * normal(2, 1, 24, 64)
    wanted = normal(1, 24, 64, seed=3)
    noise[..., 5] *= 1e4
    wanted[..., 5] *= 1e4
    noise[:, :, :5] *= 100
    found = wanted + 0.05 * normal(1, 24, 64, seed=4)
    assert beyond_rounding(found, wanted, noise) > 3
    few = wanted.clone()
    few[:, 6:10] += 5.0
    assert beyond_rounding(few, wanted, noise) == 0.0
