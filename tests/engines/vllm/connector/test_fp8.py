"""Chunks stored in 8 or 4 bits, on their way into an fp8 KV cache of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.engines.vllm.connector.paged import PagedKV
from cacheblend_rag.kv import ChunkKV
from tests.engines.vllm.exactness import SHORT, check_exact
from tests.engines.vllm.fp8_attention import FP8, fp8_backend
from tests.engines.vllm.inprocess import InProcessEngine
from tests.families.reference import DOCUMENTS, retrieved
from tests.models import make_tokenizer, prompt_of, words

SMALLEST = 2.0**-6
"""Of the cache's numbers with all their bits: vLLM's own scale is 1."""


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose values are as large as a trained one's."""
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(40)
    folder: Path = tmp_path_factory.mktemp("fp8")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["fp8", "int4"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[InProcessEngine]:
    settings = {"precision": request.param}
    config = BlendConfig(min_tokens=0, recompute_ratio=0.0)
    with fp8_backend():
        engine = InProcessEngine.open(folder, config, kv_cache_dtype="fp8", settings=settings)
        assert engine.status.active, engine.status.refusal
        assert engine.precompute(DOCUMENTS, progress=False).computed == 4
        yield engine
        engine.close()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[PagedKV]:
    """Where requests' KV was written, oldest first."""
    made: list[PagedKV] = []
    own = PagedKV.__init__

    def noted(paged: PagedKV, *given: Any) -> None:
        own(paged, *given)
        made.append(paged)

    monkeypatch.setattr(PagedKV, "__init__", noted)
    return made


def in_cache(paged: PagedKV, layer: int, start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens, each (kv_heads, tokens, head_dim), as vLLM reads them."""
    cache = paged.cache.attention[layer].kv_cache
    slots, size = paged.tables[0].slots[start : start + tokens], cache.shape[2]
    held = cache[slots // size, :, slots % size].view(FP8).float().transpose(0, 1)
    keys, values = held.chunk(2, -1)
    return keys, values


def stored(engine: InProcessEngine, tokens: int) -> ChunkKV:
    """The one stored chunk that has so many tokens."""
    store = engine.worker_connector.blender.store
    (tier,), keys = store.tiers, store.keys()
    assert all(tier.get(key).kv.precision == store.precision for key in keys)
    found = [store.get(key).kv for key in keys]
    (chunk,) = [kv for kv in found if kv is not None and kv.tokens == tokens]
    return chunk


def check_as_stored(found: Tensor, kept: Tensor, precision: str) -> None:
    """Scales of fp8 are powers of two: both hold the same three bits after the first one."""
    large = (kept.abs() >= SMALLEST) & (kept.abs() <= 448)
    assert large.float().mean() > 0.9
    rounded = kept if precision == "fp8" else kept.to(FP8).float()
    assert torch.equal(found[large], rounded[large])
    assert bool(((found[~large] - kept[~large]).abs() <= SMALLEST / 16).all())


def test_values_are_in_the_cache_as_they_are_stored_where_its_scale_has_them(
    engine: InProcessEngine, pages: list[PagedKV]
) -> None:
    report = engine.generate(retrieved(), SHORT).report
    assert report.blended
    assert all(chunk.hit and not chunk.recomputed for chunk in report.chunks)
    for chunk in report.chunks:
        kv = stored(engine, chunk.tokens)
        for layer in range(len(kv.values)):
            _, found = in_cache(pages[-1], layer, chunk.start, chunk.tokens)
            check_as_stored(found, kv.values[layer], kv.precision)


def test_keys_are_too_of_a_chunk_that_stands_where_it_was_computed(
    engine: InProcessEngine, pages: list[PagedKV]
) -> None:
    prompt = prompt_of(DOCUMENTS[0].to_chunks()[0], " w7 ", words(23, 9))
    (chunk,) = engine.generate(prompt, SHORT).report.chunks
    kv = stored(engine, chunk.tokens)
    assert chunk.hit
    assert chunk.start == kv.position == 0
    turn = engine.worker_connector.blender.stack.rotation(1)
    by_token = turn.per_token(0)  # by which keys of 4 bits, stored at position 0, are moved
    own = rotated(kv.keys, by_token) if kv.precision == "int4" else kv.keys
    for layer in range(len(kv.keys)):
        keys, values = in_cache(pages[-1], layer, 0, chunk.tokens)
        check_as_stored(keys, own[layer], kv.precision)
        check_as_stored(values, kv.values[layer], kv.precision)


def test_ratio_1_is_exact_with_packed_chunks_too(engine: InProcessEngine) -> None:
    check_exact(engine)
