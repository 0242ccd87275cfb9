"""Attention for scattered rows against a dense reference."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.backends import cuda

from cacheblend_rag.blend.attention import (
    MaskCache,
    attend_rows,
    attend_to,
    attention_bytes,
    attention_mass,
    without_cudnn,
)
from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall
from tests.memory import PeakBytes

TOKENS, HEADS, KV_HEADS, WIDTH = 300, 4, 2, 8
CPU = torch.device("cpu")
SINKS = torch.tensor([0.0, 1.5, -2.0, 3.0])


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randn(1, HEADS, TOKENS, WIDTH, generator=draw),
        torch.randn(1, KV_HEADS, TOKENS, WIDTH, generator=draw),
        torch.randn(1, KV_HEADS, TOKENS, WIDTH, generator=draw),
    )


def call_of(query: torch.Tensor, **options: Any) -> AttentionCall:
    return AttentionCall(0, query, query[:, :KV_HEADS], query[:, :KV_HEADS], 0.3, **options)


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention shares (heads, tokens, tokens) with the whole triangle laid out."""
    logits = query[0] @ keys[0].repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) * 0.3
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
    allowed = distance >= 0
    if window:
        allowed &= distance < window
    weights = logits.masked_fill(~allowed, -torch.inf).exp()
    taken = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return weights / (weights.sum(-1, keepdim=True) + taken)


CASES = pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [
        (None, None, None),
        (50, None, None),
        (None, 2.0, None),
        (50, 2.0, None),
        (None, None, SINKS),
        (50, None, SINKS),
    ],
    ids=["plain", "window", "softcap", "window-softcap", "sinks", "window-sinks"],
)
ROWS = pytest.mark.parametrize(
    "rows",
    [
        Rows.at(torch.tensor(positions).numpy(), CPU)
        for positions in (
            *(range(TOKENS), [0], [TOKENS - 1], range(37, 211), range(0, TOKENS, 2)),
            [3, 4, 5, 200],
        )
    ],
    ids=["all", "first", "last", "run", "scattered", "far apart"],
)


@CASES
@ROWS
def test_rows_get_what_dense_causal_attention_gives_them(
    rows: Rows, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    query, keys, values = inputs()
    shares = dense(query, keys, window, softcap, sinks)
    every = (shares @ values[0].repeat_interleave(HEADS // KV_HEADS, 0)).transpose(0, 1)
    asked, wanted = query[:, :, rows.device], every[rows.device]
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    found = attend_rows(call_of(asked, **options), keys, values, rows)
    torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=0)


@CASES
def test_one_token_gets_what_dense_causal_attention_gives_it(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    query, keys, values = inputs()
    shares = dense(query, keys, window, softcap, sinks)
    every = (shares @ values[0].repeat_interleave(HEADS // KV_HEADS, 0)).transpose(0, 1)
    for place in (0, 40, TOKENS - 1):
        here, seen = (
            slice(place, place + 1),
            slice(max(0, place + 1 - (window or TOKENS)), place + 1),
        )
        call = call_of(query[:, :, here], softcap=softcap, sinks=sinks)
        found = attend_to(call, keys[:, :, seen], values[:, :, seen])
        assert found.shape == (1, 1, HEADS, WIDTH)
        torch.testing.assert_close(found[0, 0], every[place], atol=1e-5, rtol=0)


@CASES
@ROWS
def test_attention_mass_is_the_dense_shares(
    rows: Rows, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    query, keys, _ = inputs()
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    found = attention_mass(call_of(query[:, :, rows.device], **options), keys, rows)
    wanted = dense(query, keys, window, softcap, sinks)[:, rows.device]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 7])
def test_the_cost_of_all_rows_is_the_cost_of_prefill(window: int | None) -> None:
    cost = LayerCost(per_row=10.0, per_row_probe=3.0, per_pair=2.0, window=window)
    seen = [min(i + 1, window or TOKENS) for i in range(TOKENS)]
    assert prefill_cost((cost,), TOKENS) == 10.0 * TOKENS + 2.0 * sum(seen)
    every = Rows.at(torch.arange(TOKENS).numpy(), CPU)
    assert cost.run(every) == prefill_cost((cost,), TOKENS)
    assert cost.run(every.part(4, 5)) == 10.0 + 2.0 * 5
    assert cost.probe(TOKENS) == 3.0 * TOKENS


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["fused", "in steps"])
@pytest.mark.parametrize("kept", [True, False], ids=["masks kept", "masks made anew"])
def test_attention_takes_no_more_memory_than_it_says(softcap: float | None, kept: bool) -> None:
    tokens, count = 1_000, 300
    rows = Rows.at(np.sort(np.random.default_rng(1).choice(tokens, count, replace=False)), CPU)
    query, keys = torch.randn(1, 6, count, 16), torch.randn(1, 2, tokens, 16)
    call, masks = call_of(query, softcap=softcap), MaskCache() if kept else None
    with PeakBytes() as memory:
        out = attend_rows(call, keys, keys, rows, masks)
    taken = memory.peak - out.nbytes
    most = attention_bytes(tokens, 6, 2, CPU, 4, in_steps=softcap is not None)
    assert taken <= most
    there = torch.device("cuda")
    on_a_gpu = [attention_bytes(n, 6, 2, there, 2, in_steps=False) for n in (500_000, 1_000_000)]
    assert on_a_gpu[1] < 2.01 * on_a_gpu[0], "no logits are laid out, however many there would be"


# Masks


# cuDNN


@pytest.fixture(params=[True, False])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(request.param)
    yield request.param
    cuda.enable_cudnn_sdp(was)


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
