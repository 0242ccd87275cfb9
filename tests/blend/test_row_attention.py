"""Which attention rows get on which device; the kernels themselves: tests/blend/kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.backends import cuda
from torch.nn.attention.bias import CausalBias

from cacheblend_rag.blend import row_attention
from cacheblend_rag.blend.attention import attend_rows
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.row_attention import RowAttention, attend_run
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry

TOKENS, HEADS, KV_HEADS, WIDTH = 90, 6, 2, 64
CPU = torch.device("cpu")
RUN = Rows.at(np.arange(20, TOKENS), CPU)
SCATTERED = Rows.at(np.arange(1, TOKENS, 3), CPU)


def fused_of(dtype: torch.dtype) -> FusedKV:
    fused = FusedKV(Geometry(1, HEADS, KV_HEADS, WIDTH, dtype, CPU), TOKENS)
    draw = torch.Generator().manual_seed(0)
    for part in (fused.keys, fused.values):
        part.copy_(torch.randn(part.shape, generator=draw))
    return fused


def call_of(
    rows: Rows, dtype: torch.dtype, window: int | None = None, **more: Any
) -> AttentionCall:
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, len(rows), WIDTH, generator=draw).to(dtype)
    own = query[:, :KV_HEADS]
    return AttentionCall(0, query, own, own, 0.2, window, **more)


def plain(call: AttentionCall, fused: FusedKV, rows: Rows) -> torch.Tensor:
    return attend_rows(call, *fused.layer(0), rows)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if the CPU were a GPU with both kernels; notes which of them was used, tests aside."""
    used: list[str] = []

    def attend_scattered(*given: Any) -> torch.Tensor:
        used.append("scattered")
        return attend_rows(*given[:4])

    run = row_attention.attend_run

    def noted_run(*given: Any) -> torch.Tensor:
        used.append("flash")
        return run(*given)

    monkeypatch.setattr(row_attention, "has_kernels", lambda _: True)
    monkeypatch.setattr(row_attention, "_attend_scattered", attend_scattered)
    monkeypatch.setattr(row_attention, "attend_run", noted_run)
    monkeypatch.setattr(row_attention, "_flash_takes", lambda *_: True)
    row_attention.works.cache_clear()
    yield used
    row_attention.works.cache_clear()


@pytest.mark.parametrize(
    ("rows", "options", "kernel"),
    [
        (RUN, {}, "flash"),
        (SCATTERED, {}, "scattered"),
        (RUN, {"window": 30}, "scattered"),
        (RUN, {"window": TOKENS}, "flash"),
        (RUN, {"window": TOKENS - 1}, "scattered"),
        (RUN, {"softcap": 3.0}, "scattered"),
        (RUN, {"sinks": torch.randn(HEADS).half()}, "scattered"),
        (SCATTERED, {"window": 30, "softcap": 3.0}, "scattered"),
    ],
)
def test_runs_attend_by_flash_attention_and_others_by_the_kernel(
    rows: Rows, options: dict[str, Any], kernel: str, on_a_gpu: list[str]
) -> None:
    fused, call = fused_of(torch.float16), call_of(rows, torch.float16, **options)
    attend = RowAttention()
    found = attend(call, fused, rows)
    assert on_a_gpu == [kernel, kernel], "once to test it"
    torch.testing.assert_close(found, plain(call, fused, rows), atol=4e-3, rtol=0)
    attend(call, fused, rows)
    assert on_a_gpu == [kernel] * 3, "it is tested once"


@pytest.mark.parametrize("rows", [RUN, SCATTERED], ids=["run", "scattered"])
def test_float32_attends_by_pytorch(rows: Rows, on_a_gpu: list[str]) -> None:
    fused, call = fused_of(torch.float32), call_of(rows, torch.float32)
    found = RowAttention()(call, fused, rows)
    assert on_a_gpu == []
    torch.testing.assert_close(found, plain(call, fused, rows), atol=0, rtol=0)


def test_a_kernel_that_computes_something_else_is_not_used(
    on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*given: Any) -> torch.Tensor:
        done = attend_rows(*given[:4])
        done[:, -1, -1, -1] = torch.nan
        return done

    monkeypatch.setattr(row_attention, "_attend_scattered", wrong)
    fused, call = fused_of(torch.float16), call_of(SCATTERED, torch.float16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = RowAttention()(call, fused, SCATTERED)
            torch.testing.assert_close(found, plain(call, fused, SCATTERED), atol=0, rtol=0)
    (told,) = caplog.messages
    assert "the scattered attention kernel is not used for" in told
    assert "its results differ by inf" in told


def test_a_kernel_that_fails_is_not_used(
    on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(row_attention, "_attend_scattered", failing)
    fused, call = fused_of(torch.float16), call_of(SCATTERED, torch.float16)
    with caplog.at_level(logging.WARNING):
        found = RowAttention()(call, fused, SCATTERED)
    torch.testing.assert_close(found, plain(call, fused, SCATTERED), atol=0, rtol=0)
    (told,) = caplog.messages
    assert told.endswith("RuntimeError: Failed to find C compiler.")


def test_a_lack_of_memory_says_nothing_about_a_kernel(
    on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, call = fused_of(torch.float16), call_of(SCATTERED, torch.float16)
    with monkeypatch.context() as patched:

        def short(*_: Any, **__: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("out of memory")

        patched.setattr(row_attention, "_attend_scattered", short)
        with pytest.raises(torch.OutOfMemoryError):
            RowAttention()(call, fused, SCATTERED)
    RowAttention()(call, fused, SCATTERED)
    assert "scattered" in on_a_gpu


def test_a_run_is_kept_off_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, seen = CausalBias._dispatch, []

    def spy(*given: Any, **named: Any) -> torch.Tensor:
        seen.append(cuda.cudnn_sdp_enabled())
        return attend(*given, **named)

    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(spy))
    call = call_of(RUN, torch.float32)
    attend_run(call, *fused_of(torch.float32).layer(0), RUN)
    assert seen == [False]
