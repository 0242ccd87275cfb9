"""Models that mix full attention and sliding windows, under vLLM's hybrid KV cache manager.

Their layers are in several KV cache groups, which have block tables of their own and share memory.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from cacheblend_rag import BlendConfig, BlendPrompt, Document
from cacheblend_rag.blend import FusedKV
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.connector.compatibility import kept_tokens, obstacle
from cacheblend_rag.engines.vllm.connector.job_runner import JobRunner
from cacheblend_rag.engines.vllm.connector.paged import PagedKV
from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from tests.engines.vllm.connector.test_finding import ask, find
from tests.engines.vllm.connector.test_finding import plain as ordinary
from tests.engines.vllm.exactness import SHORT, difference, index, logprobs
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS, OTHER_BLOCKS, retrieved
from tests.models import prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", cost_model=False)
FAMILY, GROUPS = "gemma3", 3
WINDOW, BLOCK = 48, 128
SMALL = Document("small", (words(36, 71),))


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[InProcessEngine]:
    """An engine over a mixed model; a blend's blocks are in several groups."""
    with closing(InProcessEngine.open(model_folder(FAMILY), CONFIG)) as engine:
        index(engine)
        engine.precompute([SMALL], progress=False)
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        assert len(groups) == GROUPS, "vLLM's hybrid manager is on"
        assert engine.status.active, engine.status.refusal
        yield engine


def caches(engine: InProcessEngine) -> list[torch.Tensor]:
    return [layer.kv_cache for layer in engine.worker_connector.blender.stack.attention]


def plain(engine: InProcessEngine, asked: VLLMRequest, salt: str | None = None) -> list[float]:
    """Log-probabilities after ordinary prefill."""
    return logprobs(engine, VLLMRequest(asked.token_ids, SHORT, salt or uuid.uuid4().hex))


def blended(engine: InProcessEngine, prompt: BlendPrompt, ratio: float = 1.0) -> Any:
    config = engine.config.with_changes(recompute_ratio=ratio)
    return engine.generate(prompt, SHORT, config=config).report


def test_ratio_1_equals_ordinary_prefill_and_less_is_blended(engine: InProcessEngine) -> None:
    assert difference(engine, retrieved(), 1.0) <= OTHER_BLOCKS
    for ratio in (0.0, 0.2):
        assert 1e-4 < difference(engine, retrieved(), ratio) < float("inf")
    report = blended(engine, retrieved(seed=3), 0.2)
    assert [chunk.hit for chunk in report.chunks] == [True] * 3
    assert 0 < report.recomputed_tokens < report.reused_tokens


def test_scattered_rows_attend_to_the_same_in_vllms_kernel_and_over_dense_kv(
    engine: InProcessEngine,
) -> None:
    """Over dense KV, without any block table; vLLM then decodes on what was written."""
    asked = request_of(engine, retrieved(), SHORT, engine.config.with_changes(recompute_ratio=0.2))
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        for natively in (True, False):
            patched.setattr(PagedCache, "is_fast_for_scattered_rows", natively)
            found[natively] = logprobs(engine, replace(asked, salt=uuid.uuid4().hex))
    assert found[True] == pytest.approx(found[False], abs=1e-4)
    assert found[True] != found[False], "they round differently"


@pytest.mark.parametrize("ends", ["declined", "failed"])
def test_what_is_not_blended_is_computed_by_vllm(engine: InProcessEngine, ends: str) -> None:
    """vLLM takes no failed blocks where there are several groups, but failed requests."""
    asked = request_of(engine, retrieved(seed=21), SHORT, engine.config)
    expected = plain(engine, asked)
    free = engine.free_blocks()
    with pytest.MonkeyPatch.context() as patched:
        if ends == "failed":

            def fail(*_: Any) -> Any:
                raise RuntimeError("planted")
                yield

            patched.setattr(JobRunner, "_blend", fail)
        else:
            unstored = engine.config.with_changes(min_tokens=10_000)
            asked = request_of(engine, retrieved(seed=21), SHORT, unstored)
        found = logprobs(engine, replace(asked, salt=uuid.uuid4().hex))
    assert found == pytest.approx(expected, abs=OTHER_BLOCKS)
    assert engine.free_blocks() == free


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_a_prompt_that_goes_on_is_blended_whole_if_it_has_new_chunks(
    engine: InProcessEngine, ratio: float
) -> None:
    """The KV of its earlier part cannot be read back: windows have no blocks there."""
    assert engine.scheduler_connector.finding.finder.settle()
    params = find(selector="question_mid", recompute_ratio=ratio, min_tokens=0, cost_model=False)
    first = (
        *engine.tokenize(f"{words(9, 35)}{DOCUMENTS[0].to_chunks()[1].text}"),
        *engine.tokenize(words(200, round(36 + ratio))),
    )
    [answer] = ask(engine, first, params=params, max_tokens=140)
    assert [len(c) > 0 for c in answer.params[PARAMETER]["chunks"]] == [True]
    goes_on = (*first, *answer.tokens, *engine.tokenize(words(9, 37)))
    [told] = ask(engine, goes_on, params=params)
    assert {chunk["tier"] for chunk in told.params[PARAMETER]["chunks"]} == {"prefix cache"}
    assert told.cached >= 2 * BLOCK, "vLLM keeps a window's blocks at the end of a prompt"
    new = engine.tokenize(DOCUMENTS[1].to_chunks()[1].text)
    later = (*first, *answer.tokens, *new, *engine.tokenize(words(30, 38)))
    [told] = ask(engine, later, params=params)
    chunks = told.params[PARAMETER]["chunks"]
    assert [chunk["tier"] for chunk in chunks] == ["host", "host"]
    assert told.params[PARAMETER]["prefix_tokens"] == 0
    if ratio == 1.0:
        assert told.logprobs == pytest.approx(ordinary(engine, later).logprobs, abs=1e-4)


def test_ordinary_requests_get_nothing_that_was_blended(engine: InProcessEngine) -> None:
    config = engine.config.with_changes(recompute_ratio=0.0)
    asked = request_of(engine, retrieved(seed=41), SHORT, config)
    fresh = plain(engine, asked)
    salt = uuid.uuid4().hex
    assert logprobs(engine, replace(asked, salt=salt)) != fresh
    assert plain(engine, asked, salt) == fresh


def together(engine: InProcessEngine, requests: Sequence[VLLMRequest]) -> list[tuple[int, ...]]:
    """The answers' tokens of requests that are sent at once."""

    async def tokens(request: VLLMRequest) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        async for piece in engine.vllm.send(request, stream=False):
            found = piece.token_ids
        return found

    async def all_() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(tokens, requests))

    return engine.transport.run(all_())


def test_other_requests_decode_meanwhile_in_blocks_of_their_own(engine: InProcessEngine) -> None:
    """Windows move while requests decode: vLLM frees blocks and gives them to others."""
    long = ResolvedSampling(max_tokens=140)
    asked = [
        request_of(engine, retrieved(seed=seed), long, engine.config.with_ratio(1.0))
        for seed in range(51, 55)
    ]
    fresh = [VLLMRequest(one.token_ids, long, uuid.uuid4().hex) for one in asked]
    alone = [together(engine, [one])[0] for one in fresh]
    free = engine.free_blocks()
    assert together(engine, [replace(one, salt=uuid.uuid4().hex) for one in asked]) == alone
    assert engine.free_blocks() == free


# The part before the first chunk


def short(question: int, opening: int) -> BlendPrompt:
    """A prompt of two blocks and more, whose only chunk ends before a block would be dropped."""
    return prompt_of(
        words(131, opening), SMALL.to_chunks()[0], " w7 ", words(BLOCK, 100 + question)
    )


def test_a_short_prompt_reads_the_blocks_before_its_first_chunk(engine: InProcessEngine) -> None:
    asked = request_of(engine, short(1, 81), SHORT, engine.config.with_ratio(1.0))
    (chunk,) = engine.prepare(short(1, 81)).placed
    assert BLOCK < chunk.start < chunk.end <= WINDOW + BLOCK - 2
    expected = plain(engine, asked)
    assert plain(engine, asked, "shared") == expected
    report = blended(engine, short(2, 81), 1.0)
    assert report.prefix_tokens == 0, "of another salt"
    for question in (4, 5):  # vLLM keeps a window's blocks where two prompts begin to differ
        opened = request_of(engine, short(question, 82), SHORT, engine.config)
        logprobs(engine, VLLMRequest(opened.token_ids, SHORT, opened.salt))
    report = blended(engine, short(3, 82), 1.0)
    assert report.prefix_tokens == BLOCK
    found = logprobs(engine, replace(asked, salt="shared"))
    assert found == pytest.approx(expected, abs=OTHER_BLOCKS)


def test_a_long_prompt_shares_no_blocks_and_is_exact(engine: InProcessEngine) -> None:
    """Windows' blocks before the chunks are dropped, so that the pass could not read them."""
    opening = words(300, 91)

    def asked(question: int) -> BlendPrompt:
        return prompt_of(opening, DOCUMENTS[0].to_chunks()[1], " w7 ", words(9, question))

    ordinary = request_of(engine, asked(1), SHORT, engine.config.with_ratio(1.0))
    expected = plain(engine, request_of(engine, asked(2), SHORT, engine.config))
    logprobs(engine, VLLMRequest(ordinary.token_ids[:310], SHORT, ordinary.salt))
    blend = request_of(engine, asked(2), SHORT, engine.config.with_ratio(1.0))
    found = logprobs(engine, replace(blend, salt=ordinary.salt))
    assert found == pytest.approx(expected, abs=OTHER_BLOCKS)
    assert blended(engine, asked(3), 1.0).prefix_tokens == 0


# Blocks


@torch.inference_mode()
def test_nothing_is_written_into_missing_blocks(engine: InProcessEngine) -> None:
    """The null block stands for them, in all requests."""
    engine.free_blocks()
    blender = engine.worker_connector.blender
    tokens = 3 * BLOCK + 40
    cache, groups = blender.cache, blender.cache.group_count
    fused = FusedKV(blender.stack.geometry, tokens)
    fused.keys.normal_(generator=torch.Generator().manual_seed(1))
    fused.values.normal_(generator=torch.Generator().manual_seed(2))
    tables = [
        (0, 0, 3, 4),
        *((10 * g, 10 * g + 1, 10 * g + 2, 10 * g + 3) for g in range(1, groups)),
    ]
    before = [cache[0].clone() for cache in caches(engine)]
    other = [cache[5].clone() for cache in caches(engine)]
    paged = PagedKV(cache, tables, 0, tokens)
    for layer in range(blender.stack.geometry.layers):
        paged.finish_layer(layer, fused)
    assert paged.holding(BLOCK).held_tokens == 0
    assert all(torch.equal(a, b[0]) for a, b in zip(before, caches(engine), strict=True))
    assert all(torch.equal(a, b[5]) for a, b in zip(other, caches(engine), strict=True))
    for layer, group in enumerate(cache.groups):
        keys, values = cache.read(layer, cache.table(tables[group][2:3], BLOCK).blocks)
        own = slice(2 * BLOCK, 3 * BLOCK)
        assert torch.equal(keys, fused.of_layer(layer)[0][:, own])
        assert torch.equal(values, fused.of_layer(layer)[1][:, own])


# What can be blended


def spec(kind: Any, block_size: int = 16, **more: Any) -> Any:
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return kind(block_size=block_size, **shape, **more)


def config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], one) for one in specs])


FULL, WIDE = spec(FullAttentionSpec), spec(SlidingWindowSpec, sliding_window=64)
NARROW = spec(SlidingWindowSpec, sliding_window=32)


def test_groups_of_full_attention_and_windows_are_blended() -> None:
    cache = SimpleNamespace(block_size=16)
    assert obstacle(config(FULL), cache) is None
    assert obstacle(config(FULL, WIDE, NARROW), cache) is None
    assert (
        obstacle(config(FULL, WIDE), SimpleNamespace(block_size=16, prefix_match_unit=16)) is None
    )


@pytest.mark.parametrize(
    ("other", "cache", "said"),
    [
        (spec(ChunkedLocalAttentionSpec, attention_chunk_size=64), {}, "other kinds"),
        (spec(SlidingWindowSpec, 32, sliding_window=64), {}, "different sizes"),
        (WIDE, {"prefix_match_unit": 8}, "different sizes"),
    ],
)
def test_groups_of_other_kinds_are_refused(other: Any, cache: dict[str, int], said: str) -> None:
    found = obstacle(config(FULL, other), SimpleNamespace(block_size=16, **cache))
    assert said in str(found)


def test_the_smallest_window_decides_what_is_dropped() -> None:
    assert kept_tokens(config(FULL), 16) is None
    # Of 46 tokens the next one sees the last 31: the first 15 fill no block of 16.
    assert kept_tokens(config(FULL, WIDE, NARROW), 16) == 46
