"""A few prompts are prefilled at a time; those that share chunks come next, within a bound."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import Chunk, SamplingParams, TieredKVStore
from cacheblend_rag.engines.batch_order import MOST_TOGETHER, Chunks
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers import model_steps
from cacheblend_rag.engines.transformers.prefill_queue import PrefillQueue, Turn, queue_of
from cacheblend_rag.kv import HostTier
from tests.engines.transformers.conftest import EngineFactory
from tests.kv.samples import SlowTier, make_key, until
from tests.models import prompt_of, words

PATIENCE = 60.0


def chunks(*numbers: int) -> Chunks:
    return {make_key(number): 10 for number in numbers}


@given(
    wanted=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), max_size=40),
    most=st.integers(1, 4),
    most_wait=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_bounds_hold_for_any_queue(wanted: list[set[int]], most: int, most_wait: int) -> None:
    """All arrive before the first ends; each turn ends at once."""
    queue, order = PrefillQueue(most, most_wait), list[int]()
    turns = [Turn(queue, chunks(*numbers)) for numbers in wanted]
    for turn in turns:
        queue.enter(turn)
    while len(order) < len(turns):
        running = [n for n, one in enumerate(turns) if one.has_begun.is_set() and n not in order]
        assert len(running) == min(most, len(turns) - len(order))
        order.append(running[0])
        queue.leave(turns[running[0]])
    overtaken = [one.overtaken for one in turns]
    assert all(count <= most * most_wait for count in overtaken)
    assert queue.waiting == 0


def test_the_next_prompt_shares_most_with_the_last() -> None:
    queue = PrefillQueue(most=1, most_wait=9)
    turns = [Turn(queue, wanted) for wanted in (chunks(1, 2), chunks(7), chunks(2), chunks(1, 2))]
    for turn in turns:
        queue.enter(turn)
    for ended, begun in ((0, 3), (3, 2), (2, 1)):
        assert not turns[begun].has_begun.is_set()
        queue.leave(turns[ended])
        assert turns[begun].has_begun.is_set()


def test_a_cancelled_request_leaves_the_queue() -> None:
    queue, cancel = PrefillQueue(most=1), Cancellation()
    cancel.set()
    with queue.turn(chunks(1), Cancellation()) as first, queue.turn(chunks(1), cancel) as second:
        assert first
        assert second is None
    assert queue.waiting == 0


def test_prompts_without_chunks_do_not_wait() -> None:
    queue = PrefillQueue(most=1)
    with (
        queue.turn(chunks(1), Cancellation()) as first,
        queue.turn({}, Cancellation()) as second,
    ):
        assert first
        assert second


def test_threads_read_what_they_share_once(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many threads as are prefilled at a time; memory keeps nothing of what was read."""
    monkeypatch.setattr(model_steps, "STALLED_SECONDS", PATIENCE)
    shared, *others = (Chunk(words(40, seed)) for seed in range(1 + 2 * MOST_TOGETHER))
    writer = make_engine(recompute_ratio=0.0)
    writer.precompute([shared, *others], progress=False)
    may_read = threading.Event()
    slow = SlowTier(lambda: may_read.wait(PATIENCE))
    for chunk in (shared, *others):
        kv = writer.store.get(writer.key(chunk)).kv
        assert kv is not None
        TieredKVStore([slow]).put(writer.key(chunk), kv)
    engine = make_engine(store=TieredKVStore([HostTier(1), slow]), recompute_ratio=0.0)
    engine.register([shared, *others])
    prompts = [prompt_of(words(5, turn), shared, own, "w9") for turn, own in enumerate(others)]
    queue, greedy = queue_of(engine.model), SamplingParams.greedy(max_tokens=2)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(engine.generate, prompt, greedy) for prompt in prompts]
        assert until(lambda: queue.waiting == MOST_TOGETHER, PATIENCE)
        may_read.set()
        answers = [one.result(PATIENCE) for one in asked]
    assert all(chunk.hit for answer in answers for chunk in answer.report.chunks)
    assert slow.keys.count(writer.key(shared)) == 1


def test_a_store_that_hangs_keeps_no_other_prompt_from_its_turn(
    make_engine: EngineFactory,
) -> None:
    """As many prompts as may be prefilled at a time wait for a tier; one in memory is answered."""
    near, *far = (Chunk(words(40, seed)) for seed in range(1 + MOST_TOGETHER))
    writer = make_engine(recompute_ratio=0.0)
    writer.precompute([near, *far], progress=False)
    may_read = threading.Event()
    memory, slow = HostTier(), SlowTier(lambda: may_read.wait(PATIENCE))
    for chunk in (near, *far):
        kv = writer.store.get(writer.key(chunk)).kv
        assert kv is not None
        TieredKVStore([memory if chunk is near else slow]).put(writer.key(chunk), kv)
    engine = make_engine(store=TieredKVStore([memory, slow]), recompute_ratio=0.0)
    engine.register([near, *far])
    short = SamplingParams.greedy(max_tokens=2)
    with ThreadPoolExecutor(len(far)) as pool:
        asked = [pool.submit(engine.generate, prompt_of("w1", one, "w9"), short) for one in far]
        assert until(lambda: len(slow.keys) == len(far), PATIENCE)
        assert engine.generate(prompt_of("w1", near, "w9"), short).report.chunks[0].hit
        assert not any(one.done() for one in asked)
        may_read.set()
        assert all(one.result(PATIENCE).report.chunks[0].hit for one in asked)
