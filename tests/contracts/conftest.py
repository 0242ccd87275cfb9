"""What files of contracts share: a model whose steps are counted, assertions that tell why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from transformers import PreTrainedModel

pytest.register_assert_rewrite("tests.contracts.engine")

from tests.contracts.engine import WINDOW  # noqa: E402  once it is rewritten
from tests.models import make_model  # noqa: E402


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = make_model("llama")
    model.config.max_position_embeddings = WINDOW
    return model


@pytest.fixture(scope="module")
def calls(model: PreTrainedModel) -> Iterator[list[int]]:
    """How often the model has embedded tokens: at least once a step."""
    calls, counted = [0], count(1)

    def note(*_: object) -> None:
        calls[0] = next(counted)

    hook = model.get_input_embeddings().register_forward_pre_hook(note)
    yield calls
    hook.remove()
