"""KV is written on one thread, in order, all of it; what waits is counted."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from cacheblend_rag import TieredKVStore
from cacheblend_rag.kv import HostTier, KVKey, StoredChunk
from cacheblend_rag.kv.writer import Writer
from tests.kv.samples import make_key, make_kv, until

KEYS = [make_key(number) for number in range(4)]


def test_so_many_bytes_wait_and_then_there_is_no_room() -> None:
    writer, gate = Writer(most_bytes=100), threading.Event()
    assert writer.has_room(1000), "a single write may be larger"
    first = writer.submit(70, gate.wait)
    assert writer.has_room(30)
    assert not writer.has_room(31)
    writer.submit(30, gate.wait)
    assert not writer.has_room()
    gate.set()
    writer.drain()
    assert first.result()
    assert until(lambda: writer.has_room(1000))
    writer.close(wait=True)


def test_what_fails_is_raised_where_it_is_asked_for_and_makes_room() -> None:
    writer, store = Writer(most_bytes=1), TieredKVStore.open()
    wrong = make_kv().part(0, 0)
    failed = writer.submit(1, partial(store.put, KEYS[0], wrong))
    with pytest.raises(ValueError, match="numbers are"):
        failed.result()
    assert until(writer.has_room)
    writer.close(wait=True)


def test_chunks_are_written_in_order_on_one_other_thread_though_the_writer_is_closed() -> None:
    gate, seen = threading.Event(), list[tuple[KVKey, int]]()

    class Gated(HostTier):
        def _save(self, key: KVKey, chunk: StoredChunk) -> None:
            assert gate.wait(20)
            seen.append((key, threading.get_ident()))
            super()._save(key, chunk)

    writer, store = Writer(), TieredKVStore([Gated()])
    puts = [writer.submit(1, partial(store.put, key, make_kv())) for key in KEYS]
    writer.close(wait=False)
    with pytest.raises(RuntimeError):
        writer.submit(1, int)
    gate.set()
    assert all(put.result(20) for put in puts)
    assert [key for key, _ in seen] == KEYS
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_a_tier_that_fails_is_named_though_memory_took_the_chunk() -> None:
    class Failing(HostTier):
        durable = True

        def _save(self, key: KVKey, chunk: StoredChunk) -> None:
            raise OSError("no route to host")

    store = TieredKVStore([HostTier(), Failing(name="far")])
    put = store.put(KEYS[0], make_kv())
    assert (put.refusal, put.failure) == ("far tier: no route to host",) * 2
    assert store.contains(KEYS[0]), "this process has it"
