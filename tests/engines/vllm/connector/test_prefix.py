"""What stands before a prompt's first chunk is shared in vLLM's prefix cache; blended KV is not."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, Generation
from cacheblend_rag.engines.vllm import same_passages
from cacheblend_rag.engines.vllm.connector.paged_cache import FP8, PagedCache, block_layout
from cacheblend_rag.engines.vllm.connector.prefix import set_apart
from cacheblend_rag.engines.vllm.in_process import vllm_sampling
from cacheblend_rag.engines.vllm.protocol.job import NOTHING_FOUND
from cacheblend_rag.engines.vllm.same_passages import IDLE, ONE_TOKEN
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.prefill.prompt_pass import ALL_EXACT
from cacheblend_rag.reason import ReasonCode
from tests.engines.vllm.exactness import SHORT, check_exact, index
from tests.engines.vllm.fp8_attention import fp8_backend
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS
from tests.kv.samples import until
from tests.models import prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="question_mid", cost_model=False)
"""Without the question, the chunks behind the prefix would be another prompt's, too."""
BLOCK = 16


@pytest.fixture
def blend_config() -> BlendConfig:
    return CONFIG


@pytest.fixture
def engine(llama: InProcessEngine) -> InProcessEngine:
    index(llama)
    return llama


# Hashes of blocks


@pytest.fixture(scope="module", autouse=True)
def _seeded() -> None:
    init_none_hash(sha256)  # older releases draw another seed each time


def hashed(tokens: Sequence[int], salt: str | None = None) -> Request:
    """vLLM's own request, with the hashes of its blocks."""
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", list(tokens), SamplingParams(), None, cache_salt=salt, block_hasher=hasher)


def same_blocks(one: Request, other: Request) -> list[bool]:
    pairs = zip(one.block_hashes, other.block_hashes, strict=True)
    return [mine == theirs for mine, theirs in pairs]


def apart(start: int, mark: str = "m", *, tokens: int = 100, salt: str | None = None) -> Request:
    request = hashed(range(tokens), salt)
    set_apart(request, start, BLOCK, mark)
    return request


@pytest.mark.parametrize("start", [0, 5, 16, 40, 47, 48])
def test_blocks_are_apart_from_the_first_chunk_on(start: int) -> None:
    request, plain = hashed(range(100)), hashed(range(100))
    shared = set_apart(request, start, BLOCK, "m")
    assert shared == start // BLOCK * BLOCK
    for one in (request, plain):  # decoding fills further blocks
        one.append_output_token_ids(list(range(60)))
    assert same_blocks(request, plain) == [
        block < start // BLOCK for block in range(len(plain.block_hashes))
    ]
    assert len(set(request.block_hashes)) == len(plain.block_hashes)


def test_blocks_are_shared_by_what_they_depend_on() -> None:
    assert all(same_blocks(apart(40), apart(40)))
    assert same_blocks(apart(40), apart(40, "n")) == [True, True, False, False, False, False]
    assert same_blocks(apart(40), apart(24)) == [True, False, False, False, False, False]
    assert not any(same_blocks(apart(0), apart(0, "n")))


def test_salts_share_nothing_before_the_chunk_or_after() -> None:
    for start in (0, 40):
        assert not any(same_blocks(apart(start, salt="one"), apart(start, salt="other")))
        assert not any(same_blocks(apart(start, salt="one"), apart(start)))


# Requests


def prompt(question: int, tokens: int = 23) -> BlendPrompt:
    """An instruction of several blocks, chunks that are not where they were, and a question."""
    last, first = DOCUMENTS[1].to_chunks()[::-1]
    between = question * " w7 "  # so that none repeats the work of another
    return prompt_of(words(300, 51), last, between, first, " w7 ", words(tokens, question))


def sent(engine: InProcessEngine, asked: BlendPrompt, ratio: float = 0.3) -> VLLMRequest:
    return request_of(engine, asked, SHORT, engine.config.with_ratio(ratio))


def told(engine: InProcessEngine, *requests: VLLMRequest) -> list[tuple[list[float], int]]:
    """Log-probabilities of greedy tokens, and tokens found in vLLM's cache, of requests at once."""

    async def one(request: VLLMRequest) -> tuple[list[float], int]:
        sampling = vllm_sampling(request)
        sampling.logprobs, sampling.ignore_eos = 1, True
        found: list[float] = []
        held = 0
        async for step in engine.vllm.outputs(request, sampling):
            out = step.outputs[0]
            pairs = zip(out.logprobs, out.token_ids, strict=True)
            found += [top[token].logprob for top, token in pairs]
            held = step.num_cached_tokens
        return found, held

    async def all_() -> list[tuple[list[float], int]]:
        return await asyncio.gather(*map(one, requests))

    return engine.transport.run(all_())


def ordinary(engine: InProcessEngine, request: VLLMRequest) -> list[float]:
    """Log-probabilities of ordinary prefill, behind a prefix that an ordinary request has left.

    Without one they are the same but for rounding, which depends on where computing begins.
    """
    salt, shared = uuid.uuid4().hex, shared_tokens(engine)
    told(engine, replace(plain_of(request, salt), token_ids=request.token_ids[: shared + 1]))
    seen, held = told(engine, plain_of(request, salt))[0]
    assert held == shared
    fresh = told(engine, plain_of(request, uuid.uuid4().hex))[0][0]
    assert seen == pytest.approx(fresh, abs=1e-5)
    return seen


def plain_of(request: VLLMRequest, salt: str | None = None) -> VLLMRequest:
    return replace(request, wish=NOTHING_FOUND, salt=salt)


def generate(engine: InProcessEngine, asked: BlendPrompt, **changes: Any) -> Generation:
    return engine.generate(asked, SHORT, config=engine.config.with_changes(**changes))


def block_size(engine: InProcessEngine) -> int:
    return int(engine.core.vllm_config.cache_config.block_size)


def shared_tokens(engine: InProcessEngine) -> int:
    """Tokens in whole blocks before the first chunk."""
    start = engine.prepare(prompt(1)).placed[0].start
    shared = start // block_size(engine) * block_size(engine)
    assert 0 < shared < start, "a block holds the end of the instruction and a chunk's beginning"
    return shared


@pytest.mark.parametrize("ratio", [1.0, 0.3, 0.0])
def test_a_prefix_is_reused_exactly(engine: InProcessEngine, ratio: float) -> None:
    first, second = (generate(engine, prompt(q), recompute_ratio=ratio).report for q in (1, 2))
    shared = shared_tokens(engine)
    assert (first.prefix_tokens, second.prefix_tokens) == (0, shared)
    assert second.blended
    assert second.compute_share < first.compute_share
    assert second.recomputed_tokens == first.recomputed_tokens
    assert second.reused_tokens == first.reused_tokens + shared
    asked = sent(engine, prompt(3), ratio)
    behind, alone = (
        told(engine, request)[0][0] for request in (asked, replace(asked, salt="nothing is held"))
    )
    assert behind == pytest.approx(alone, abs=1e-5)
    if ratio == 1.0:
        assert behind == pytest.approx(ordinary(engine, asked), abs=1e-5)


def test_ordinary_requests_are_served_the_prefix_and_no_blended_kv(engine: InProcessEngine) -> None:
    asked = sent(engine, prompt(1), 0.0)
    blended = told(engine, asked)[0][0]
    plain, held = told(engine, plain_of(asked))[0]
    assert held == shared_tokens(engine)
    assert plain == ordinary(engine, asked)
    assert blended != pytest.approx(plain, abs=1e-4), "reuse of moved chunks is never exact"


def test_a_blend_is_served_the_prefix_of_ordinary_requests(engine: InProcessEngine) -> None:
    asked = sent(engine, prompt(1), 1.0)
    told(engine, plain_of(asked))
    assert told(engine, asked)[0][0] == pytest.approx(ordinary(engine, asked), abs=1e-5)
    report = generate(engine, prompt(2)).report
    assert report.prefix_tokens == shared_tokens(engine)


def test_rows_that_others_may_get_attend_as_in_vllm(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered rows attend by PyTorch on most machines, which rounds differently."""
    monkeypatch.setattr(PagedCache, "is_fast_for_scattered_rows", False)
    asked = sent(engine, prompt(1))
    blended = told(engine, asked)[0][0]
    plain, held = told(engine, plain_of(asked))[0]
    assert held == shared_tokens(engine)
    assert plain == ordinary(engine, asked)
    monkeypatch.setattr(PagedCache, "is_fast_for_scattered_rows", True)
    assert told(engine, replace(asked, salt="natively"))[0][0] != blended, "they round differently"


def test_a_prefix_that_is_computed_in_the_same_step_is_waited_for(engine: InProcessEngine) -> None:
    """vLLM hands out blocks as soon as it has planned to compute them."""
    asked = sent(engine, prompt(1), 1.0)
    _, (blended, _) = told(engine, plain_of(sent(engine, prompt(2))), asked)
    told_of = engine.scheduler_connector.reports.values()
    assert [result.prefix_tokens for result in told_of][-1] == shared_tokens(engine)
    assert blended == pytest.approx(ordinary(engine, asked), abs=1e-5)


def test_without_reuse_nothing_of_other_requests_is_used(engine: InProcessEngine) -> None:
    for question in (1, 1, 2):
        report = generate(engine, prompt(question), reuse_prefix=False).report
        assert report.prefix_tokens == 0
        assert {chunk.tier for chunk in report.chunks} == {"host"}, "not out of the prefix cache"
    bare = engine.config.with_changes(reuse_prefix=False)
    without_chunks = request_of(engine, words(300, 51), SHORT, bare)
    for request in (without_chunks, plain_of(sent(engine, prompt(1)))):
        assert told(engine, request)[0][1] == 0


def test_what_is_not_blended_tells_its_prefix(engine: InProcessEngine) -> None:
    generate(engine, prompt(1))
    store = engine.worker_connector.blender.store
    for key in list(store.entries()):
        store.evict(key)
    report = generate(engine, prompt(2)).report
    assert report.reason_code == ReasonCode.NOT_STORED
    assert report.prefix_tokens == report.reused_tokens == shared_tokens(engine)
    assert 0 < report.compute_share < 1


# The same passages again


def again(question: int) -> BlendPrompt:
    """A question over the same passages in the same order."""
    last, first = DOCUMENTS[1].to_chunks()[::-1]
    return prompt_of(words(300, 51), last, " w7 ", first, " w7 ", words(23, question))


def check_again(engine: InProcessEngine, question: int, salt: str | None = None) -> None:
    """Check that the passages are an exact prefix, reported as the embedded engine does."""
    prepared = replace(engine.prepare(again(question)), cache_salt=salt)
    report = engine.generate(prepared, SHORT).report
    first, last = prepared.placed
    end = last.end
    held = end // block_size(engine) * block_size(engine)
    assert (report.reason, report.selector_reason) == (None, ALL_EXACT)
    assert [chunk.tier for chunk in report.chunks] == ["prefix cache"] * 2
    assert [chunk.recomputed for chunk in report.chunks] == [0, end - held]
    assert report.prefix_tokens == first.start
    assert report.reused_tokens == held - (last.start - first.end)
    asked = replace(sent(engine, again(question), 0.0), salt=salt)
    (behind, cached), (alone, _) = (
        told(engine, request)[0] for request in (asked, plain_of(asked, uuid.uuid4().hex))
    )
    assert (behind, cached) == (pytest.approx(alone, abs=1e-5), held)


def idle(engine: InProcessEngine) -> None:
    """Wait until there is no more idle work."""
    assert until(lambda: engine._idle._thread is None, 60)


def test_what_vllm_computed_in_full_is_an_exact_prefix(engine: InProcessEngine) -> None:
    told(engine, plain_of(sent(engine, again(1))))
    check_again(engine, 2)
    salted = replace(engine.prepare(again(3)), cache_salt="another")
    assert engine.generate(salted, SHORT).report.recomputed_tokens > 0
    for changes in ({"reuse_prefix": False}, {"trace": True}):
        assert generate(engine, again(4), **changes).report.recomputed_tokens > 0
    assert generate(engine, prompt(1)).report.recomputed_tokens > 0, "in another order"


def test_a_beginning_that_vllm_holds_does_not_stand_for_a_short_passage(
    engine: InProcessEngine,
) -> None:
    passage = Chunk(words(60, 99))
    engine.precompute([passage], progress=False)
    for question in (1, 2):
        asked = prompt_of(words(300, 51), passage, " w7 ", words(23, question))
        told(engine, plain_of(sent(engine, asked)))
        asked = prompt_of(words(300, 51), passage, " w7 ", words(23, question + 2))
        (chunk,) = generate(engine, asked).report.chunks
        assert (chunk.hit, chunk.tier) == (True, "host")


def test_what_was_to_be_blended_and_is_computed_in_full_is_one_too(
    engine: InProcessEngine,
) -> None:
    store = engine.worker_connector.blender.store
    for key in list(store.entries()):
        store.evict(key)
    assert generate(engine, again(1)).report.reason_code == ReasonCode.NOT_STORED
    index(engine)
    assert engine.scheduler_connector.finding.finder.settle()
    check_again(engine, 2)


def test_passages_that_come_again_are_computed_while_vllm_is_idle(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_passages, "STEP_TOKENS", 200)
    for question in (1, 2, 3):
        assert generate(engine, again(question)).report.recomputed_tokens > 0
        idle(engine)
    engine.fill_on_miss = True
    for salt in (None, "another"):
        for question in (4, 5):
            salted = replace(engine.prepare(again(question)), cache_salt=salt)
            assert engine.generate(salted, SHORT).report.recomputed_tokens > 0
            idle(engine)
        check_again(engine, 6, salt)


def test_idle_work_waits_until_vllm_does_nothing_else(engine: InProcessEngine) -> None:
    asked, ended = sent(engine, again(1)), []

    async def one(request: VLLMRequest) -> None:
        async for _ in engine.transport.send(request, stream=False):
            pass
        ended.append(request.wish.kind)

    async def both() -> None:
        requests = (VLLMRequest(asked.token_ids, ONE_TOKEN, wish=IDLE), asked)
        await asyncio.gather(*map(one, requests))

    engine.transport.run(both())
    assert ended == ["find", "idle"]


# Reading back


def test_a_prefix_is_reused_exactly_where_some_layers_are_not_in_fp8(
    model_folder: Callable[[str], Path], blend_config: BlendConfig
) -> None:
    """With --kv-cache-dtype-skip-layers, layers of one KV cache group differ."""
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "2"]}

    def opened() -> InProcessEngine:
        return InProcessEngine.open(model_folder("llama"), blend_config, **options)

    with fp8_backend(), closing(opened()) as engine:
        cache = engine.worker_connector.blender.cache
        assert [layer.kv_cache.itemsize for layer in cache.attention] == [4, 1, 4, 1]
        index(engine)
        check_exact(engine)
        asked = sent(engine, prompt(1), 1.0)
        reports = [generate(engine, prompt(q), recompute_ratio=1.0).report for q in (2, 3)]
        assert [one.prefix_tokens for one in reports] == [0, shared_tokens(engine)]
        behind, _ = told(engine, asked)[0]
        assert behind == pytest.approx(ordinary(engine, asked), abs=1e-5)
        check_read_back(cache, {0, 2})


@torch.inference_mode()
def check_read_back(cache: PagedCache, plain: set[int]) -> None:
    """Each layer's KV is read back as it was written; plain: layers that are not in fp8."""
    size, blocks = cache.kernel_block_size, torch.tensor([5, 2])
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    for place, layer in enumerate(cache.attention):
        kv = 3 * torch.randn(2, 2 * size, layer.num_kv_heads, layer.head_size)
        layer.impl.do_kv_cache_update(layer, *kv, layer.kv_cache, slots)
        kept = kv if place in plain else kv.to(torch.float8_e4m3fn).float()
        for read, wanted in zip(cache.read(place, blocks), kept, strict=True):
            assert torch.equal(read, wanted.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", ["", "rounded", "twice", "left out"])
def test_a_layout_is_found_only_if_every_number_is_kept(dtype: torch.dtype, fault: str) -> None:
    shape = (BLOCK, 3, 40)
    count = 2 * BLOCK * 3 * 40
    order = torch.randperm(count + 7, generator=torch.Generator().manual_seed(1))[:count]
    if fault == "twice":
        order = torch.cat((order, order[:1]))
    if fault == "left out":
        order = order[:-1]

    def write(_: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        flat = torch.stack((keys, values))[:, slots].flatten()
        flat = flat // 2 if fault == "rounded" else flat
        spare = cache.flatten()
        spare[order[: len(flat)]] = flat[: len(order)]
        cache.copy_(spare.view_as(cache))

    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=write))
    found = block_layout(layer, torch.zeros(1, count + 7, dtype=dtype), shape, dtype)
    if fault in {"rounded", "left out"}:
        assert found is None
    else:
        assert found is not None
        assert torch.equal(found.places.flatten(), order[:count])


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_cache_in_fp8_is_read_in_its_own_format_and_scale(
    fp8: torch.dtype, dtype: torch.dtype, per_head: bool
) -> None:
    tokens, heads, width = shape = (BLOCK, 3, 40)
    scales = torch.tensor([0.37, 1.0, 2.5])[: None if per_head else 1]

    def write(layer: Any, keys: Any, values: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        for part, kv, scale in ((0, keys, layer._k_scale), (1, values, layer._v_scale)):
            kept = (kv.float() / scale.view(-1, 1)).to(fp8).view(torch.uint8)
            cache[0][part][:, slots] = kept.transpose(0, 1)

    layer = SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=write),
        _k_scale=scales if per_head else scales[0],
        _v_scale=2 * (scales if per_head else scales[0]),
    )
    cache = torch.zeros(1, 2, heads, tokens, width, dtype=torch.uint8)
    found = block_layout(layer, cache, shape, dtype)
    assert found is not None
    assert found.fp8 == fp8
    keys, values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    write(layer, keys, values, cache, torch.arange(tokens))
    for told, kv in zip(found.read(layer, cache, dtype), (keys, values), strict=True):
        torch.testing.assert_close(told, kv.transpose(0, 1), rtol=0.13, atol=0.01)


@pytest.mark.parametrize("fault", ["quantized", "unknown backend"])
def test_a_cache_that_cannot_be_read_back_has_no_layout(fault: str) -> None:
    def write(*_: Any) -> None:
        raise NotImplementedError

    layer = SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=write),
        kv_cache=torch.zeros(4, 8, dtype=torch.uint8 if fault == "quantized" else torch.float32),
        num_kv_heads=1,
        head_size=2,
    )
    cache = PagedCache([layer], [0], [None], 2, 2, 4, torch.float32)
    assert cache.layouts is None
