"""New chunk KV is written on a thread: bounded, in order, all of it by the end, on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cacheblend_rag import TieredKVStore
from cacheblend_rag.engines.vllm.connector.chunk_writer import MOST_WAITING, ChunkWriter
from cacheblend_rag.kv import HostTier, StoredChunk
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.stored_chunk import PutResult
from tests.blend.fake_stack import FakeStack
from tests.kv.samples import make_key, make_kv, until
from tests.prefill.prompts import Ranks, run

KEYS = [make_key(number) for number in range(MOST_WAITING + 2)]


class Gated(TieredKVStore):
    """A store whose puts wait; notes who puts."""

    def __init__(self, *, takes: bool = True) -> None:
        self.gate, self.threads, self.begun = threading.Semaphore(0), set[int](), list[KVKey]()
        self._takes = takes
        super().__init__(TieredKVStore.open().tiers)

    def put(self, key: KVKey, kv: ChunkKV, *, written_at: float | None = None) -> PutResult:
        self.threads.add(threading.get_ident())
        self.begun.append(key)
        assert self.gate.acquire(timeout=20)
        stored = super().put(key, kv, written_at=written_at)
        return stored if self._takes else PutResult(False)


def test_so_many_chunks_wait_and_then_the_job_does() -> None:
    store = Gated()
    writer = ChunkWriter(FakeStack(), store)
    for key in KEYS[: MOST_WAITING - 1]:
        assert list(writer.put(key, make_kv())) == []
    waiting = writer.put(KEYS[MOST_WAITING - 1], make_kv())
    for _ in range(3):
        next(waiting)
    store.gate.release()
    assert until(lambda: next(waiting, "over") == "over")
    store.gate.release(len(KEYS))
    assert run(writer.finish()) == MOST_WAITING
    assert store.begun == KEYS[:MOST_WAITING]
    assert threading.get_ident() not in store.threads
    assert all(store.contains_many(KEYS[:MOST_WAITING]))


def test_what_the_store_does_not_take_is_not_counted_and_what_is_malformed_is_raised() -> None:
    store = Gated(takes=False)
    store.gate.release(9)
    writer = ChunkWriter(FakeStack(), store)
    run(writer.put(KEYS[0], make_kv()))
    assert run(writer.finish()) == 0
    assert (writer.refused, writer.failed) == ({"store full": 1}, {})
    wrong: Any = ChunkKV.of(make_kv().keys, make_kv().values[:1], 0)
    raising = ChunkWriter(FakeStack(), store)
    run(raising.put(KEYS[1], wrong))
    with pytest.raises(ValueError, match="values"):
        run(raising.finish())


def test_a_tier_that_fails_is_named_though_memory_took_the_chunk() -> None:
    class Failing(HostTier):
        durable = True

        def _save(self, key: KVKey, chunk: StoredChunk) -> None:
            raise OSError("no route to host")

    store = TieredKVStore([HostTier(), Failing(name="far")])
    writer = ChunkWriter(FakeStack(), store)
    for key in KEYS[:2]:
        run(writer.put(key, make_kv()))
    assert run(writer.finish()) == 0
    assert writer.refused == writer.failed == {"far tier: no route to host": 2}
    assert all(store.contains_many(KEYS[:2])), "this process has them"


def test_what_was_handed_over_is_written_though_the_job_is_given_up() -> None:
    store = Gated()
    writer = ChunkWriter(FakeStack(), store)
    run(writer.put(KEYS[0], make_kv()))
    writer.close()
    store.gate.release()
    assert until(lambda: store.contains(KEYS[0]))


def test_ranks_wait_for_each_other() -> None:
    """Each takes as many steps as the other, or they would wait for one that is gone."""
    stores = [Gated(), Gated()]
    stores[0].gate.release(9)
    slow = 3

    def of(rank: int, stack: FakeStack) -> tuple[int, int]:
        writer, steps = ChunkWriter(stack, stores[rank]), 0
        run(writer.put(KEYS[0], make_kv()))
        finishing = writer.finish()
        while True:
            try:
                next(finishing)
                steps += 1
            except StopIteration as done:
                return steps, done.value
            if steps == slow:
                stores[1].gate.release(9)

    one, other = Ranks().run(of)
    assert one == other
    assert one[0] >= slow


def test_a_model_that_overflows_loses_that_chunk_alone() -> None:
    writer = ChunkWriter(FakeStack(), TieredKVStore.open())
    bad = make_kv()
    bad.keys[0] = float("nan")
    run(writer.put(KEYS[0], bad))
    run(writer.put(KEYS[1], make_kv()))
    assert run(writer.finish()) == 1
    assert writer.refused == {"its KV holds NaN or infinity, the model overflows": 1}
    assert writer.failed == {}
