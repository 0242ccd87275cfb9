"""A prompt's chunks on a slow tier are read side by side, from when its job is taken on."""

from __future__ import annotations

import threading

import pytest

from cacheblend_rag import BlendConfig, Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.kv import HostTier, StoredChunk
from tests.engines.vllm.inprocess import InProcessEngine
from tests.kv.samples import SlowTier
from tests.models import prompt_of, words

CHUNKS = [Chunk(words(40, seed)) for seed in range(8)]
PROMPTS = [prompt_of(words(6, seed), *CHUNKS, "w9") for seed in (98, 99)]
SHORT = SamplingParams(max_tokens=4)
CONFIG = BlendConfig(min_tokens=0, selector="random", recompute_ratio=0.5)


@pytest.fixture
def engine(llama: InProcessEngine) -> InProcessEngine:
    llama.precompute(CHUNKS, progress=False)
    return llama


def test_chunks_are_read_at_once_and_once_each(engine: InProcessEngine) -> None:
    blender = engine.worker_connector.blender
    everybody = threading.Barrier(len(CHUNKS), timeout=20)
    slow = SlowTier(everybody.wait)
    for key, entry in blender.store.entries().items():
        kv = blender.store.get(key).kv
        assert slow.put(key, StoredChunk(kv, entry.written_at))
    with TieredKVStore([HostTier(None), slow]) as store, pytest.MonkeyPatch.context() as settings:
        settings.setattr(blender.jobs, "store", store)
        first, second = (engine.generate(prompt, SHORT).report for prompt in PROMPTS)
    assert [chunk.tier for chunk in first.chunks] == ["slow"] * len(CHUNKS)
    assert [chunk.tier for chunk in second.chunks] == ["host"] * len(CHUNKS)
    assert slow.most_at_once == len(CHUNKS)
    assert len(slow.keys) == len(set(slow.keys)) == len(CHUNKS)
