"""No attention of a request runs on cuDNN: neither of a blend nor of the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.backends import cuda
from torch.nn import functional

from cacheblend_rag import Chunk, SamplingParams
from tests.engines.transformers.conftest import EngineFactory
from tests.models import prompt_of, words

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether cuDNN might be chosen, for each call of PyTorch's attention."""
    attend, found = functional.scaled_dot_product_attention, []

    def spy(*given: Any, **named: Any) -> torch.Tensor:
        found.append(cuda.cudnn_sdp_enabled())
        return attend(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return found


def test_a_request_is_kept_off_cudnn_throughout(
    make_engine: EngineFactory, seen: list[bool]
) -> None:
    chunk = Chunk(words(30, 1))
    prompt = prompt_of("w5 w6", chunk, "w7 w8")
    was = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    try:
        engine = make_engine(recompute_ratio=0.5)
        assert seen, "the trial at load"
        for work in (
            lambda: engine.precompute([chunk], progress=False),
            lambda: engine.generate(prompt, SHORT),
            lambda: engine.generate_full(prompt, SHORT),
        ):
            seen.append(False)
            before = len(seen)
            work()
            assert len(seen) >= before + engine.model.config.num_hidden_layers
        layers = engine.model.config.num_hidden_layers
        assert len(seen) > 2 * layers * SHORT.max_tokens, "each decoded token attends in each layer"
        assert not any(seen)
        assert cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(was)
