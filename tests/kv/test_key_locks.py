"""KeyLocks: who waits for whom, and that nothing is left of a lock that nobody holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.key_locks import KeyLocks

KEYS = [KVKey(f"{index:032x}", "0" * 64) for index in range(200)]


def test_different_keys_never_wait_for_each_other() -> None:
    """Each thread waits, with its key's lock held, until all of them hold theirs."""
    locks, everybody = KeyLocks(), threading.Barrier(len(KEYS), timeout=20)

    def hold(key: KVKey) -> None:
        with locks.held(key):
            everybody.wait()

    with ThreadPoolExecutor(len(KEYS)) as pool:
        list(pool.map(hold, KEYS))
    assert len(locks) == 0


def test_one_key_is_held_by_one_thread_at_a_time() -> None:
    locks, counts = KeyLocks(), {"now": 0, "most": 0, "done": 0}

    def work(turn: int) -> None:
        with locks.held(KEYS[0], KEYS[1 + turn % 3]):
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
            threading.Event().wait(0.001)
            counts["now"] -= 1
            counts["done"] += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(60)))
    assert counts == {"now": 0, "most": 1, "done": 60}
    assert len(locks) == 0


def test_many_keys_in_any_order_are_no_deadlock() -> None:
    locks, done = KeyLocks(), []

    def work(turn: int) -> None:
        keys = KEYS[:5] if turn % 2 else KEYS[4::-1]
        with locks.held(*keys, keys[0]):
            done.append(turn)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    assert len(done) == 200
