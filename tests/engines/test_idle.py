"""The queue of idle work by itself: who wakes it, who waits for it, and how it ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads

import pytest

from cacheblend_rag.engines.lifetime import IdleJob, IdleQueue
from tests.kv.samples import until

PATIENCE = 60.0


class Idler:
    """What a queue asks of its engine."""

    def __init__(self) -> None:
        self.is_open = True
        self.idle = Event()

    def _is_idle(self) -> bool:
        return self.idle.is_set()


@pytest.fixture
def engine() -> Idler:
    engine = Idler()
    engine.idle.set()
    return engine


@pytest.fixture
def queue(engine: Idler) -> Iterator[IdleQueue]:
    queue = IdleQueue(engine)
    yield queue
    queue.close()


def idle_threads() -> list[Thread]:
    return [thread for thread in enumerate_threads() if thread.name == "cacheblend-idle"]


def steps_of(told: SimpleQueue[object], count: int) -> Generator[None, None, None]:
    for step in range(count):
        told.put((step, current_thread().name))
        yield


def test_jobs_of_higher_priority_go_first_of_equals_the_first(queue: IdleQueue) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    begun, go_on = Event(), Event()

    def steps() -> Generator[None, None, None]:
        begun.set()
        go_on.wait(PATIENCE)
        yield

    for name, priority in (("first", 0), ("low", -1), ("a", 1), ("b", 1), ("high", 2)):
        job = IdleJob(name, steps, priority, partial(ended.put, name))
        assert queue.add(job)
        assert begun.wait(PATIENCE), "the first one runs while the others come"
    go_on.set()
    names = [ended.get(timeout=PATIENCE) for _ in range(5)]
    assert names == ["first", "high", "a", "b", "low"]


def test_a_job_that_fails_stops_nothing_and_is_told_of_until_one_succeeds(
    queue: IdleQueue, caplog: pytest.LogCaptureFixture
) -> None:
    told: SimpleQueue[object] = SimpleQueue()

    def ended() -> None:
        raise RuntimeError("at the end")

    def exits() -> Generator[None, None, None]:
        raise SystemExit("in a step")
        yield

    good, bad = (lambda: steps_of(told, 1)), ("bad", exits)
    for job in (IdleJob(*bad), IdleJob(*bad), IdleJob("bad", good), IdleJob("bad", good, 0, ended)):
        assert queue.add(job)
    assert [told.get(timeout=PATIENCE) for _ in range(2)], "the thread goes on"
    assert until(lambda: not idle_threads(), PATIENCE)
    assert [one.getMessage() for one in caplog.records] == [
        "idle work 'bad' failed: in a step",
        "idle work 'bad' failed: at the end",
    ]
