"""The queue of idle work by itself: who wakes it, who waits for it, and how it ends."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads
from weakref import proxy, ref

import pytest

from cacheblend_rag.engines import idle
from cacheblend_rag.engines.idle import Activity, IdleJob, IdleQueue
from tests.engines.test_forked import told_by
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


def test_one_thread_is_started_with_a_job_and_ends_with_the_last(queue: IdleQueue) -> None:
    told: SimpleQueue[object] = SimpleQueue()
    for _ in range(2):
        assert until(lambda: not idle_threads(), PATIENCE)
        assert queue.add(IdleJob("job", lambda: steps_of(told, 2)))
        assert [told.get(timeout=PATIENCE) for _ in range(2)] == [
            (0, "cacheblend-idle"),
            (1, "cacheblend-idle"),
        ]
    assert until(lambda: not idle_threads(), PATIENCE)


def test_jobs_of_higher_priority_go_first_of_equals_the_first(queue: IdleQueue) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    begun, go_on = Event(), Event()

    def steps() -> Generator[None, None, None]:
        begun.set()
        go_on.wait(PATIENCE)
        yield

    for name, priority in (("first", 0), ("low", -1), ("a", 1), ("b", 1), ("high", 2)):
        job = IdleJob(name, steps, priority, ended=lambda name=name: ended.put(name))  # type: ignore[misc]
        assert queue.add(job)
        assert begun.wait(PATIENCE), "the first one runs while the others come"
    go_on.set()
    names = [ended.get(timeout=PATIENCE) for _ in range(5)]
    assert names == ["first", "high", "a", "b", "low"]


def test_an_engine_that_is_no_longer_open_has_no_idle_time_to_come(
    queue: IdleQueue, engine: Idler
) -> None:
    ended = Event()
    engine.idle.clear()
    queue.add(IdleJob("job", lambda: steps_of(SimpleQueue(), 1), ended=ended.set))
    engine.is_open = False
    assert ended.wait(PATIENCE)


def test_a_job_may_close_its_queue(queue: IdleQueue) -> None:
    ended = Event()

    def steps() -> Generator[None, None, None]:
        queue.close()
        yield

    queue.add(IdleJob("job", steps, ended=ended.set))
    assert ended.wait(PATIENCE)
    assert not queue.accepts("job")


def test_the_work_of_an_engine_that_was_dropped_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, ended = Idler(), Event()
    queue = IdleQueue(proxy(engine))
    queue.add(IdleJob("job", lambda: steps_of(SimpleQueue(), 1), ended=ended.set))
    gone = ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert ended.wait(PATIENCE)
    assert caplog.records == []
    assert not queue.accepts("job")


def test_a_system_without_threads_takes_no_job(
    queue: IdleQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(idle.threading.Thread, "start", fail)
        job = IdleJob("job", lambda: iter(()), when_failed="nothing is done")
        assert not queue.add(job)
    assert caplog.record_tuples == [
        (idle.__name__, logging.WARNING, "nothing is done: can't start new thread")
    ]
    assert queue.add(job), "it is tried again with the next one"


def test_a_fork_has_no_idle_work(queue: IdleQueue, engine: Idler) -> None:
    engine.idle.clear()
    told: SimpleQueue[object] = SimpleQueue()
    assert queue.add(IdleJob("job", lambda: steps_of(told, 1)))

    def in_the_fork() -> object:
        return os.getpid(), queue.add(IdleJob("job", lambda: iter(()))), queue.close()

    assert told_by(in_the_fork).endswith(", False, None)")
    engine.idle.set()
    assert told.get(timeout=PATIENCE), "the parent's goes on"


def test_what_idle_work_asks_is_no_request_at_work(queue: IdleQueue) -> None:
    activity, told = Activity(), SimpleQueue[bool]()

    def steps() -> Generator[None, None, None]:
        with activity.working():
            told.put(activity.is_idle)
        yield

    queue.add(IdleJob("job", steps))
    assert told.get(timeout=PATIENCE)
    with activity.working(), activity.working():
        assert not activity.is_idle
    assert activity.is_idle


def test_what_fails_at_a_jobs_end_stops_nothing(
    queue: IdleQueue, engine: Idler, caplog: pytest.LogCaptureFixture
) -> None:
    told: SimpleQueue[object] = SimpleQueue()

    def ended() -> None:
        raise RuntimeError("at the end")

    def exits() -> Generator[None, None, None]:
        raise SystemExit
        yield

    assert queue.add(IdleJob("bad", lambda: steps_of(told, 1), ended=ended))
    assert told.get(timeout=PATIENCE)
    assert queue.add(IdleJob("exits", exits))
    assert queue.add(IdleJob("good", lambda: steps_of(told, 1)))
    assert told.get(timeout=PATIENCE), "the thread goes on"
    assert until(lambda: not idle_threads(), PATIENCE)
    assert "the end of idle work 'bad' failed" in caplog.text
    engine.idle.clear()
    assert queue.add(IdleJob("waiting", lambda: steps_of(told, 1)))
    assert queue.add(IdleJob("bad", lambda: steps_of(told, 1), ended=ended))
    queue.close()  # raises nothing, so an engine's closing goes on


def test_work_that_somebody_else_does_last_is_handed_over_at_once(
    queue: IdleQueue, engine: Idler
) -> None:
    engine.idle.clear()
    told: SimpleQueue[object] = SimpleQueue()
    assert queue.add(IdleJob("job", lambda: steps_of(told, 2), waits=False))
    assert [told.get(timeout=PATIENCE) for _ in range(2)]
