"""Chunks precomputed by one engine are found by the other, from one folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cacheblend_rag import BlendConfig, StoreConfig, TieredKVStore, TransformersEngine
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.test_exactness import DOCUMENTS, SHORT, retrieved
from tests.models import make_tokenizer

REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0)


def test_both_engines_use_one_store(
    open_vllm: EngineFactory, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ConnectorSettings(StoreConfig(tmp_path))
    vllm = open_vllm(settings=settings, config=REUSE)
    embedded = TransformersEngine(
        model_folder("llama"),
        tokenizer=make_tokenizer(),
        config=REUSE,
        store=TieredKVStore.open(host_bytes=0, disk_path=tmp_path),
    )
    assert embedded.precompute(DOCUMENTS[:1], progress=False).computed == 2
    assert vllm.precompute(DOCUMENTS[:1], progress=False).skipped == 2
    assert vllm.precompute(DOCUMENTS[1:], progress=False).computed == 2
    assert embedded.precompute(DOCUMENTS[1:], progress=False).skipped == 2

    here, there = (engine.generate(retrieved(), SHORT) for engine in (vllm, embedded))
    assert here.token_ids == there.token_ids
    assert [chunk.hit for chunk in here.report.chunks] == [True] * 3
    assert [chunk.hit for chunk in there.report.chunks] == [True] * 3
