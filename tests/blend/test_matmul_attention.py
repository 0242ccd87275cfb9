"""Attention by matrix products against a dense reference, and where it is used."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend_rag.blend import attention, matmul_attention, onednn
from cacheblend_rag.blend.attention import attend_rows, attention_mass
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.masks import MaskCache
from cacheblend_rag.blend.matmul_attention import (
    attend_by_mass,
    attend_by_matmul,
    prefers_matmul,
)
from cacheblend_rag.blend.onednn import has_onednn, onednn_is_faster, onednn_linear
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall
from tests.blend.test_attention import CASES, CPU, GEOMETRY, HEADS, KV_HEADS, ROWS, TOKENS, dense
from tests.blend.test_attention import inputs as made_inputs

pytestmark = pytest.mark.skipif(not has_onednn(), reason="oneDNN is used on x86 only")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AVX-512 that Intel did not make."""
    for module in (attention, matmul_attention):
        monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
        monkeypatch.setattr(module, "LEAST_TOKENS", 64)


def scattered(*positions: int) -> Rows:
    return Rows.at(np.array(positions), CPU)


@CASES
@ROWS
@pytest.mark.parametrize("most", [1, 10, 384])
def test_rows_get_what_dense_causal_attention_gives_them(
    rows: Rows,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul_attention, "MATMUL_ROWS", most)
    monkeypatch.setattr(matmul_attention, "LEAST_BLOCK", 1)
    query, keys, values = made_inputs()
    shares = dense(query, keys, window, softcap, sinks)
    every = (shares @ values[0].repeat_interleave(HEADS // KV_HEADS, 0)).transpose(0, 1)
    asked, wanted = query[:, :, rows.device], every[rows.device]
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    masks = MaskCache()
    for _ in range(2):  # the second time with the masks of the first
        found = attend_by_matmul(asked, keys, values, rows, scaling=0.3, masks=masks, **options)
        assert found.shape == (1, len(rows), HEADS, query.shape[3])
        torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=0)


@CASES
@ROWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_the_mass_times_the_values(
    rows: Rows,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    query, keys, values = (part.to(dtype) for part in made_inputs())
    asked = query[:, :, rows.device]
    options: dict[str, Any] = {
        "scaling": 0.3, "window": window, "softcap": softcap, "sinks": sinks
    }  # fmt: skip
    mass = attention_mass(asked, keys, rows, **options)
    unwritten = values.clone()
    unwritten[:, :, rows.last + 1 :] = torch.nan
    found = attend_by_mass(mass, unwritten, rows.last + 1)
    assert (found.dtype, found.shape) == (dtype, (1, len(rows), HEADS, query.shape[3]))
    wanted = attend_rows(asked.float(), keys.float(), values.float(), rows, **options)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    query, keys, values = (part.to(dtype) for part in made_inputs())
    rows = scattered(3, 4, 100, 250, 299)
    asked = query[:, :, rows.device]
    found = attend_by_matmul(asked, keys, values, rows, scaling=0.3)
    wide = attend_rows(asked.float(), keys.float(), values.float(), rows, scaling=0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wide.to(dtype), atol=torch.finfo(dtype).eps, rtol=0.01)


@pytest.mark.parametrize("softcap", [None, 300.0])
@pytest.mark.parametrize("most", [0, 40, 200])
@pytest.mark.parametrize("shift", [-300.0, -100.0, -40.0, 40.0, 100.0, 300.0])
def test_logits_may_be_far_from_zero(shift: float, most: int, softcap: float | None) -> None:
    """Powers of the farthest would be infinite, or all 0. Half of the rows' logits stay near.

    shift: of the logits, in units of e. most: of the sinks, either way; 0 is none.
    """
    sinks = torch.linspace(-most, most, HEADS) if most else None
    query, keys, values = made_inputs()
    keys[..., 0] = shift / 0.3
    query[..., 0] = torch.arange(TOKENS) % 2
    rows = scattered(3, 4, 100, 251, 299)
    options: dict[str, Any] = {"scaling": 0.3, "softcap": softcap, "sinks": sinks}
    asked = query[:, :, rows.device]
    found = attend_by_matmul(asked, keys, values, rows, **options)
    wanted = attend_rows(asked.double(), keys.double(), values.double(), rows, **options)
    torch.testing.assert_close(found.double(), wanted.double(), atol=2e-4, rtol=1e-3)


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    query, keys, values = made_inputs()
    rows = scattered(3, 100, 299)
    keys[0, 0, 50, 3] = torch.nan
    found = attend_by_matmul(query[:, :, rows.device], keys, values, rows, scaling=0.3)
    copies = HEADS // KV_HEADS
    assert found[0, 1:, :copies].isnan().all(), "rows that see it"
    assert found[0, :, copies:].isfinite().all()


def test_inputs_may_lie_in_memory_in_any_order() -> None:
    """As a model's own: (tokens, heads, head_dim), transposed."""
    query, keys, values = made_inputs()
    rows = Rows.at(np.arange(TOKENS), CPU)
    wanted = attend_by_matmul(query, keys, values, rows, scaling=0.3)
    turned = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (query, keys, values)]
    torch.testing.assert_close(attend_by_matmul(*turned, rows, scaling=0.3), wanted)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("positions", [(100, 101, 130), range(100, 131)])
def test_keys_that_no_row_sees_are_not_read(
    positions: Sequence[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_attention, "MATMUL_ROWS", 10)
    monkeypatch.setattr(matmul_attention, "LEAST_BLOCK", 1)
    query, keys, values = made_inputs()
    rows = scattered(*positions)
    asked = query[:, :, rows.device]
    wanted = attend_by_matmul(asked, keys, values, rows, scaling=0.3, window=window)
    for part in (keys, values):
        part[:, :, 131:] = torch.nan
        part[:, :, : 0 if window is None else 100 - window + 1] = torch.nan
    found = attend_by_matmul(asked, keys, values, rows, scaling=0.3, window=window)
    torch.testing.assert_close(found, wanted)


def test_blocks_are_as_large_as_the_heads_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 384 rows of a product; fewer where their logits would be too many."""
    sizes: list[int] = []

    def noted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return onednn_linear(rows, weight)

    monkeypatch.setattr(matmul_attention, "onednn_linear", noted)
    query, keys, values = made_inputs()
    every = Rows.at(np.arange(TOKENS), CPU)
    whole = attend_by_matmul(query, keys, values, every, scaling=0.3)
    most = 384 // (HEADS // KV_HEADS)
    blocks = [most, most, TOKENS - most, TOKENS - most]  # logits and values of each
    assert sizes == KV_HEADS * [rows * HEADS // KV_HEADS for rows in blocks]
    sizes.clear()
    monkeypatch.setattr(matmul_attention, "MOST_LOGITS", TOKENS * 2 * 50)
    found = attend_by_matmul(query, keys, values, every, scaling=0.3)
    assert set(sizes) == {50 * HEADS // KV_HEADS}
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("window", [None, 200])
def test_prompts_of_other_lengths_share_compiled_products(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of the last keys, which are not rounded up beyond the prompt."""
    shapes: set[tuple[int, ...]] = set()

    def noted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.add((*rows.shape, *weight.shape))
        return onednn_linear(rows, weight)

    monkeypatch.setattr(matmul_attention, "onednn_linear", noted)
    monkeypatch.setattr(matmul_attention, "MATMUL_ROWS", 32)
    keys = torch.randn(1, 1, 2000, 4, generator=torch.Generator().manual_seed(5))

    def attend(tokens: int) -> None:
        part = keys[:, :, :tokens]
        rows = Rows.at(np.arange(tokens), CPU)
        attend_by_matmul(part, part, part, rows, scaling=0.3, window=window)

    attend(2000)
    before, blocks = len(shapes), -(-2000 // 32)
    assert before <= (2 * 48 if window is None else 2 * 10) < 2 * blocks
    lengths = range(1900, 2000, 7)
    for tokens in lengths:
        attend(tokens)
    assert len(shapes) - before <= 2 * 2 * len(lengths)


def test_malloc_reuses_the_memory_of_logits() -> None:
    """See raise_malloc_threshold."""
    assert matmul_attention.MOST_LOGITS * torch.float32.itemsize < 31 << 20


@pytest.mark.parametrize(("copies", "tokens"), [(1, 32_768), (3, 32_768), (4, 32_768), (8, 16_416)])
def test_the_products_of_a_long_prompt_are_kept(copies: int, tokens: int) -> None:
    """With those of a layer's packed weights, at most seven."""
    rows = Rows.at(np.arange(tokens), CPU)
    most = matmul_attention._block_rows(copies, tokens)
    blocks = matmul_attention._blocks(rows, None, most, MaskCache())
    shapes = {(one.here.stop - one.here.start, one.keys.stop) for one in blocks}
    assert 2 * len(shapes) + 7 <= int(onednn.KEPT_PRODUCTS)


@pytest.mark.usefixtures("fast")
def test_a_pass_attends_so_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def noted(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        used.append(query.shape[2])
        return attend_by_matmul(query, *rest, **named)

    monkeypatch.setattr("cacheblend_rag.blend.row_attention.attend_by_matmul", noted)
    query, keys, values = made_inputs()
    fused = FusedKV(GEOMETRY, TOKENS)
    fused.keys[:], fused.values[:] = keys, values
    rows = scattered(7, 9, 250)
    asked = query[:, :, rows.device]
    call = AttentionCall(0, asked, asked, asked, 0.3)
    found = RowAttention()(call, fused, rows)
    assert used == [3]
    torch.testing.assert_close(found, attend_rows(asked, keys, values, rows, scaling=0.3))


@pytest.mark.usefixtures("fast")
def test_other_inputs_attend_as_before() -> None:
    one = torch.empty(1, 2, 3, 4)
    assert prefers_matmul(one, 64)
    assert prefers_matmul(one.bfloat16(), 64)
    assert not prefers_matmul(one, 63)
    assert not prefers_matmul(one.double(), 64)
    assert not prefers_matmul(one.expand(2, -1, -1, -1), 64)
    assert not prefers_matmul(one.to("meta"), 64)


@pytest.mark.parametrize(
    ("capability", "limit", "is_fast"),
    [
        ("AVX512", None, True),
        ("AVX512", "AVX512_CORE", True),
        ("AVX512", "AVX2", False),
        ("AVX2", None, False),
    ],
)
def test_it_needs_avx_512(
    capability: str,
    limit: str | None,
    is_fast: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(onednn._may_use_avx512.cache_clear)
    monkeypatch.setattr(onednn, "is_intel", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if limit is None:
        monkeypatch.delenv(onednn.LIMIT, raising=False)
    else:
        monkeypatch.setenv(onednn.LIMIT, limit)
    onednn._may_use_avx512.cache_clear()
    assert onednn_is_faster() is is_fast
    with torch.backends.mkldnn.flags(enabled=False):
        assert not onednn_is_faster()
    monkeypatch.setattr(onednn, "is_intel", lambda: True)
    assert not onednn_is_faster()


@pytest.mark.parametrize(
    ("told", "is_intel"),
    [("vendor_id\t: GenuineIntel\n", True), ("AuthenticAMD", False), ("", False)],
)
@pytest.mark.parametrize("is_linux", [True, False])
def test_the_maker_of_the_cpu_is_read_from_the_system(
    told: str,
    is_intel: bool,
    is_linux: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    request.addfinalizer(onednn.is_intel.cache_clear)
    onednn.is_intel.cache_clear()
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(onednn, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "processor", lambda: "" if is_linux else told)
    if is_linux:
        cpuinfo.write_text(told)
    assert onednn.is_intel() is is_intel


def test_caches_of_compiled_products_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = onednn.CACHES
    monkeypatch.setenv(first, "7")
    monkeypatch.setenv(second, "7")  # so that it is restored
    monkeypatch.delenv(second)
    onednn.bound_caches()
    assert (os.environ[first], os.environ[second]) == ("7", onednn.KEPT_PRODUCTS)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory from /proc")
def test_products_of_many_shapes_take_bounded_memory() -> None:
    """In a process of its own: the caches are as large as at its first product."""
    program = """
import torch
from cacheblend_rag.blend.onednn import bound_caches, onednn_linear
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
bound_caches()
weight = torch.randn(64, 64)
torch.set_num_threads(1)
with torch.inference_mode():
    onednn_linear(torch.randn(1, 64), weight)
    before = resident()
    for rows in range(2, 1_500):
        onednn_linear(torch.randn(rows, 64), weight)
print(resident() - before)
"""
    clean = {name: value for name, value in os.environ.items() if name not in onednn.CACHES}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean
    )
    assert float(done.stdout) < 500
