"""A pass in vLLM: in blocks of rows, over memory as it was left, by each attention, and traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, TransformersEngine
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache
from tests.engines.vllm.exactness import SHORT, SOME, check_exact, difference, index, logprobs
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS, OTHER_BLOCKS, retrieved
from tests.models import make_tokenizer

HAS_FP8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


@pytest.mark.parametrize("natively", [True, False])
def test_memory_that_nothing_has_written_is_not_read(
    short_steps: InProcessEngine, monkeypatch: pytest.MonkeyPatch, natively: bool
) -> None:
    """Whatever is in it: kernels read blocks of the cache to their ends, and 0 x NaN is NaN."""
    index(short_steps)
    blender = short_steps.worker_connector.blender
    monkeypatch.setattr(PagedCache, "is_fast_for_scattered_rows", natively)
    monkeypatch.setattr(blender.stack, "row_block", 20)  # one ends just before a separator
    config = short_steps.config.with_changes(selector="hkvd", recompute_ratio=SOME)
    asked = request_of(short_steps, retrieved(), SHORT, config)
    expected = logprobs(short_steps, replace(asked, salt=f"{natively} before"))
    begin = FusedKV.__init__

    def unwritten(fused: FusedKV, *given: Any, **named: Any) -> None:
        begin(fused, *given, **named)
        fused.keys.fill_(math.nan)
        fused.values.fill_(math.nan)

    monkeypatch.setattr(FusedKV, "__init__", unwritten)
    assert logprobs(short_steps, replace(asked, salt=f"{natively} after")) == expected
    assert difference(short_steps, retrieved(), 1.0) <= OTHER_BLOCKS


@pytest.mark.parametrize("selector", ["hkvd", "prior", "question_mid"])
def test_both_engines_trace_the_same(
    llama: InProcessEngine, model_folder: Callable[[str], Path], selector: str
) -> None:
    config = BlendConfig(
        min_tokens=0, selector=selector, recompute_ratio=SOME, cost_model=False, trace=True
    )
    embedded = TransformersEngine(
        model_folder("llama"), tokenizer=make_tokenizer(), config=config, dtype=torch.float32
    )
    traces = []
    for engine in (embedded, llama):
        engine.precompute(DOCUMENTS, progress=False)
        report = engine.generate(retrieved(seed=31), SHORT, config=config).report
        assert report.trace is not None
        assert report.trace.rows[-1] == report.recomputed_tokens > 0
        traces.append(report.trace)
    embedded.close()
    ours, theirs = traces
    assert ours.rows == theirs.rows
    for one, other in zip(ours.selections, theirs.selections, strict=True):
        assert (one.layer, one.positions, one.chosen) == (
            other.layer, other.positions, other.chosen
        )  # fmt: skip
        assert sum(one.chosen) == ours.rows[-1]
    assert ours.protected == theirs.protected
    assert [one.layer for one in ours.layers] == [one.layer for one in theirs.layers] != []


@pytest.mark.skipif(not HAS_FP8, reason="vLLM's CPU build needs AVX-512 or AMX for it")
def test_ratio_1_equals_ordinary_prefill_with_an_fp8_cache(
    model_folder: Callable[[str], Path], blend_config: BlendConfig
) -> None:
    """Of vLLM's own backend; of others in test_fp8.py and test_on_gpus.py."""
    opened = InProcessEngine.open(model_folder("llama"), blend_config, kv_cache_dtype="fp8")
    with closing(opened) as engine:
        index(engine)
        assert {a.kv_cache.itemsize for a in engine.worker_connector.blender.stack.attention} == {1}
        check_exact(engine)
