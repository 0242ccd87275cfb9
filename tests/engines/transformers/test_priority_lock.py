"""Whoever waits for an answer comes before what fills a store."""

from __future__ import annotations

import time
from threading import Event, Thread

from cacheblend_rag.engines.transformers.model_steps import QUIET_SECONDS, PriorityLock

PATIENCE = 30.0


def gets_left_over(turns: PriorityLock, patience: float = 0.0) -> bool:
    with turns.left_over(patience) as is_mine:
        return is_mine


def test_a_turn_is_left_over_once_nobody_had_one_for_a_moment() -> None:
    turns = PriorityLock()
    with turns.taken():
        pass
    left = time.monotonic()
    assert not gets_left_over(turns)
    assert gets_left_over(turns, PATIENCE)
    assert time.monotonic() - left >= QUIET_SECONDS


def test_no_turn_is_left_over_while_one_is_taken_or_wanted() -> None:
    turns, holds, wants, release = PriorityLock(), Event(), Event(), Event()

    def hold() -> None:
        with turns.taken():
            holds.set()
            release.wait(PATIENCE)

    def want() -> None:
        wants.set()
        with turns.taken():
            pass

    threads = [Thread(target=hold), Thread(target=want)]
    threads[0].start()
    assert holds.wait(PATIENCE)
    threads[1].start()
    assert wants.wait(PATIENCE)
    assert not gets_left_over(turns, 3 * QUIET_SECONDS)
    release.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert gets_left_over(turns, PATIENCE)
