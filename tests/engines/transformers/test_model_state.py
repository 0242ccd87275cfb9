"""Changes that test_adapters.py makes to no engine are noticed, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cacheblend_rag.engines.transformers.watched_model import ModelState


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.none = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), None
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("transient", torch.zeros(2), persistent=False)
        self.register_parameter("absent", None)


def model() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.LayerNorm(2))


def replace_weight(made: nn.Module) -> None:
    made[0].first.weight = nn.Parameter(torch.zeros(2, 2))


def write_buffer(made: nn.Module) -> None:
    made[0].kept.add_(1)


def add_parameter(made: nn.Module) -> None:
    made[1].absent = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("change", [replace_weight, write_buffer, add_parameter])
def test_a_change_is_noticed(change: Callable[[nn.Module], None]) -> None:
    made = model()
    before = ModelState.of(made)
    assert ModelState.of(made).has_weights_of(before)
    change(made)
    assert not ModelState.of(made).has_weights_of(before)


def test_running_the_model_and_what_is_not_saved_with_it_are_no_change() -> None:
    made = model()
    before = ModelState.of(made)
    made[0].transient.add_(1)
    made[2](torch.zeros(1, 2))
    assert ModelState.of(made).has_weights_of(before)


def test_inference_tensors_are_looked_at() -> None:
    made = model()
    with torch.inference_mode():
        made[2].weight = nn.Parameter(torch.ones(2), requires_grad=False)
    before = ModelState.of(made)
    made[0].first.weight = nn.Parameter(torch.zeros(2, 2))
    assert not ModelState.of(made).has_weights_of(before)
