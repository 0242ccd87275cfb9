"""Requests that are at work at the same time share forward passes and reads, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cacheblend_rag import (
    Chunk,
    OutOfMemoryError,
    SamplingParams,
    TieredKVStore,
    TransformersEngine,
)
from cacheblend_rag.engines.answer import MOST_TOGETHER
from cacheblend_rag.engines.transformers import ordinary_prefill
from cacheblend_rag.engines.transformers import prefill as prefill_module
from cacheblend_rag.engines.transformers.loop import loop_of
from cacheblend_rag.kv import HostTier
from cacheblend_rag.text.prompt import BlendPrompt
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import SlowTier, until
from tests.models import prompt_of, words

PATIENCE = 60.0
TOKENS = 24
CHUNKS = [[Chunk(words(20, 10 * prompt + n)) for n in range(2)] for prompt in range(8)]
PROMPTS = [
    prompt_of(words(3 + prompt, 90 + prompt), *chunks, words(4, 70 + prompt))
    for prompt, chunks in enumerate(CHUNKS)
]


def greedy(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams.greedy(max_tokens=tokens, ignore_eos=True)


class Steps:
    """The decode steps of a model: how many texts each forward pass over one token had.

    seen: is called in each of them, in the thread that runs the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.sizes: list[int] = []
        self.seen: Callable[[], object] = lambda: None
        self.hook = model.model.layers[1].mlp.register_forward_pre_hook(self._note)

    def _note(self, _: Any, given: tuple[Tensor, ...]) -> None:
        if given[0].shape[1] == 1:
            self.sizes.append(given[0].shape[0])
            self.seen()


@pytest.fixture
def steps(model: PreTrainedModel) -> Iterator[Steps]:
    noted = Steps(model)
    yield noted
    noted.hook.remove()


@pytest.fixture
def engine(make_engine: EngineFactory) -> Iterator[TransformersEngine]:
    engine = make_engine(recompute_ratio=0.0, reuse_prefix=False)
    engine.precompute([chunk for chunks in CHUNKS for chunk in chunks], progress=False)
    yield engine
    engine.close()


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result(PATIENCE) for done in [pool.submit(work) for work in works]]


def asked_at_once(works: Sequence[Callable[[], Any]], model: PreTrainedModel) -> list[Any]:
    """What they return, if all of them ask before the model runs a step."""
    loop, begun = loop_of(model), threading.Event()

    def stand() -> None:
        begun.set()
        until(lambda: loop._mail.qsize() >= len(works), PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop.call, stand)
        assert begun.wait(PATIENCE)
        return in_threads(works)


def alone(
    engine: TransformersEngine, prompts: Sequence[BlendPrompt], sampling: SamplingParams
) -> list[tuple[int, ...]]:
    return [engine.generate(prompt, sampling).token_ids for prompt in prompts]


def test_a_batch_takes_as_many_passes_as_one_answer(
    engine: TransformersEngine, steps: Steps
) -> None:
    wanted = alone(engine, PROMPTS, greedy())
    assert steps.sizes == [1] * (len(PROMPTS) * (TOKENS - 1))
    steps.sizes.clear()
    answers = engine.generate_batch(PROMPTS, greedy())
    assert [answer.token_ids for answer in answers] == wanted
    assert steps.sizes == [len(PROMPTS)] * (TOKENS - 1)
    for answer in answers:
        assert answer.report.blended
        assert answer.report.reused_tokens == 40
        assert answer.report.seconds.decode > 0


def test_each_request_keeps_its_own_sampling(engine: TransformersEngine, steps: Steps) -> None:
    asked = [
        (PROMPTS[0], SamplingParams(max_tokens=9, temperature=0.9, seed=3)),
        (PROMPTS[1], SamplingParams(max_tokens=30, temperature=0.7, top_p=0.8, seed=4)),
        (PROMPTS[2], SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3)),
        (PROMPTS[3], greedy(17)),
    ]
    text = engine.generate(PROMPTS[4], greedy(30)).text
    asked.append((PROMPTS[4], SamplingParams(max_tokens=30, temperature=0.0, stop=text[40:45])))
    wanted = [engine.generate(*one) for one in asked]
    assert wanted[-1].finish_reason == "stop"
    steps.sizes.clear()
    found = asked_at_once([partial(engine.generate, *one) for one in asked], engine.model)
    assert [(a.token_ids, a.text, a.finish_reason) for a in found] == [
        (a.token_ids, a.text, a.finish_reason) for a in wanted
    ]
    assert max(steps.sizes) == len(asked)


def test_a_request_that_fails_fails_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the longest has to grow its cache, for which there is no memory."""
    wanted = alone(engine, PROMPTS[:3], greedy(8))
    asked: list[int] = []

    def failing(fused: Any, tokens: int) -> None:
        asked.append(tokens)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(prefill_module, "GROWTH_TOKENS", 8)
    monkeypatch.setattr(ordinary_prefill, "_grow", failing)

    def fail() -> None:
        with pytest.raises(OutOfMemoryError, match="lower max_tokens"):
            engine.generate(PROMPTS[3], greedy(60))

    works = [partial(engine.generate, prompt, greedy(8)) for prompt in PROMPTS[:3]]
    *found, _ = asked_at_once([*works, fail], engine.model)
    assert asked
    assert [answer.token_ids for answer in found] == wanted


def test_a_step_that_fails_is_run_in_smaller_batches(
    engine: TransformersEngine, steps: Steps, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    wanted = alone(engine, PROMPTS[:4], greedy(6))
    steps.sizes.clear()
    monkeypatch.setattr(ordinary_prefill, "_told", set())
    decode_batch = ordinary_prefill.decode_batch
    tried: list[int] = []

    def small(stack: Any, caches: Sequence[Any], token_ids: Sequence[int]) -> Tensor:
        tried.append(len(caches))
        if len(caches) > 2:
            raise ValueError("odd")
        return decode_batch(stack, caches, token_ids)

    monkeypatch.setattr(ordinary_prefill, "decode_batch", small)
    answers = engine.generate_batch(PROMPTS[:4], greedy(6))
    assert [answer.token_ids for answer in answers] == wanted
    assert max(tried) == 4
    assert max(steps.sizes) == 2
    told = [record for record in caplog.records if "in smaller batches" in record.getMessage()]
    assert len(told) == 1


def slowly(
    make_engine: EngineFactory, near: Sequence[Chunk], far: Sequence[Chunk], memory: HostTier
) -> tuple[TransformersEngine, SlowTier, threading.Event]:
    """An engine that finds chunks in memory, or in a tier that waits for an event."""
    writer = make_engine(recompute_ratio=0.0)
    writer.precompute([*near, *far], progress=False)
    may_read = threading.Event()
    slow = SlowTier(lambda: may_read.wait(PATIENCE))
    for chunk in (*near, *far):
        kv = writer.store.get(writer.key(chunk)).kv
        assert kv is not None
        TieredKVStore([memory if chunk in near else slow]).put(writer.key(chunk), kv)
    engine = make_engine(store=TieredKVStore([memory, slow]), recompute_ratio=0.0)
    engine.register([*near, *far])
    return engine, slow, may_read


def test_a_store_that_hangs_keeps_no_other_prompt_from_its_turn(make_engine: EngineFactory) -> None:
    """As many prompts as may be prefilled at a time wait for a tier; one in memory is answered."""
    near, *far = (Chunk(words(40, seed)) for seed in range(1 + MOST_TOGETHER))
    engine, slow, may_read = slowly(make_engine, [near], far, HostTier())
    with ThreadPoolExecutor(len(far)) as pool:
        asked = [pool.submit(engine.generate, prompt_of("w1", one, "w9"), greedy(2)) for one in far]
        assert until(lambda: len(slow.keys) == len(far), PATIENCE)
        assert engine.generate(prompt_of("w1", near, "w9"), greedy(2)).report.chunks[0].hit
        assert not any(one.done() for one in asked)
        may_read.set()
        assert all(one.result(PATIENCE).report.chunks[0].hit for one in asked)
