"""Planning a store: sizes that stored chunks have, and what follows from what is told of tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import ChunkKV, codec
from cacheblend_rag.rag.planning import PRECISIONS, KVShape, PlannedTier, Workload, plan_store
from tests.kv.samples import make_key
from tests.toy import TOY

LLAMA = KVShape(layers=32, kv_heads=8, head_dim=128, itemsize=2)
MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("tokens", [3, 64, 512])
def test_a_chunk_takes_what_it_is_planned_with(tokens: int) -> None:
    shape = KVShape(layers=6, kv_heads=2, head_dim=16, itemsize=2)
    values = torch.rand(6, 2, tokens, 16, dtype=torch.bfloat16)
    kv = ChunkKV(values, values.clone(), 1, torch.zeros(tokens))
    for precision in PRECISIONS:
        real = len(codec.encode(make_key(1), replace(kv, precision=precision)))
        planned = shape.chunk_bytes(precision, tokens)
        assert real <= planned <= real + 2048


def test_bytes_are_those_that_the_model_has() -> None:
    # 512 tokens of an 8B Llama take 64 MiB (docs/storage.md), half of it in eight bits.
    assert LLAMA.chunk_bytes("native", 512) == pytest.approx(64 * MIB, rel=1e-3)
    for precision in PRECISIONS[1:]:
        assert LLAMA.chunk_bytes(precision, 512) == pytest.approx(32 * MIB, rel=0.03)
    assert LLAMA.chunk_bytes("fp8", 512) < LLAMA.chunk_bytes("int8", 512)


def test_the_demo_models_shape_is_read_from_its_config() -> None:
    from cacheblend_rag.engines.model_config import kv_bytes_per_token, text_config

    shape = KVShape.of(TOY, "float32", "cpu")
    large = shape.chunk_bytes("native", 1 << 20) / (1 << 20)
    assert large == pytest.approx(kv_bytes_per_token(text_config(TOY), torch.float32), rel=1e-3)


def test_the_last_tier_that_holds_all_in_time_suffices() -> None:
    tiers = [
        PlannedTier("host", 8 * GIB, 20 * GIB),
        PlannedTier("disk", 1 << 40, 2 * GIB, 0.001),
        PlannedTier("s3", 1 << 50, 200 * MIB, 0.1),
    ]
    corpus = 1000 * 512
    made = plan_store(LLAMA, Workload(corpus, ttft_seconds=0.5), tiers)
    native, fp8, _ = made.precisions
    assert native.corpus_bytes == 1000 * LLAMA.chunk_bytes("native", 512)
    assert native.prompt_bytes == 8 * LLAMA.chunk_bytes("native", 512)
    host, disk, s3 = native.tiers
    assert host.chunks == 8 * GIB // LLAMA.chunk_bytes("native", 512)
    assert (host.share, disk.share) == (host.chunks / 1000, 1.0)
    assert disk.seconds == pytest.approx(0.001 + native.prompt_bytes / (2 * GIB))
    assert (host.is_fast, disk.is_fast, s3.is_fast) == (True, True, False)
    assert (native.tier, fp8.tier) == ("disk", "disk")
    assert s3.share == 1.0
    without = plan_store(LLAMA, Workload(corpus), tiers)
    assert without.precisions[0].tier == "s3"
    slow = plan_store(LLAMA, Workload(corpus, compute_seconds=0.4, ttft_seconds=0.5), tiers)
    assert [plan.tier for plan in slow.precisions] == [None, None, None]


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("host=64GiB,20GiB/s", PlannedTier("host", 64 * GIB, 20 * GIB)),
        ("s3=1TB, 200MB/s, 0.05s", PlannedTier("s3", 10**12, 200 * 10**6, 0.05)),
    ],
)
def test_a_tier_is_read(text: str, tier: PlannedTier) -> None:
    assert PlannedTier.parse(text) == tier


@pytest.mark.parametrize(
    "text", ["", "host", "host=", "host=1GiB", "=1GiB,1GiB", "h=1GiB,0", "h=x,1"]
)
def test_what_is_no_tier_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier"):
        PlannedTier.parse(text)
