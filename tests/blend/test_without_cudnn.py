"""PyTorch's attention never runs on cuDNN while it is used here, and the setting comes back."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch.backends import cuda
from torch.nn import functional

from cacheblend_rag.blend.attention import attend_rows, without_cudnn
from cacheblend_rag.blend.rows import Rows

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(request.param)
    yield request.param
    cuda.enable_cudnn_sdp(was)


def test_attention_of_scattered_rows_is_kept_off_cudnn(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, seen = functional.scaled_dot_product_attention, []

    def spy(*given: Any, **named: Any) -> torch.Tensor:
        seen.append(cuda.cudnn_sdp_enabled())
        return attend(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    keys = torch.randn(1, 2, 300, 8)
    rows = Rows.at(torch.arange(0, 300, 2).numpy(), CPU)
    attend_rows(torch.randn(1, 4, 150, 8), keys, keys, rows, scaling=1.0)
    assert len(seen) > 1
    assert not any(seen)
    assert cuda.cudnn_sdp_enabled() is before


def test_it_comes_back_when_the_last_of_several_threads_leaves(before: bool) -> None:
    entered, inside = Barrier(3), []

    def work() -> None:
        with without_cudnn(), without_cudnn():
            entered.wait()
            inside.append(cuda.cudnn_sdp_enabled())

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with without_cudnn():
        entered.wait()
        for thread in threads:
            thread.join()
        assert not cuda.cudnn_sdp_enabled(), "others have left, this thread has not"
    assert inside == [False, False]
    assert cuda.cudnn_sdp_enabled() is before
