"""Idle work, by itself: who wakes it, how it ends; and forked engines, which do not work."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from threading import enumerate as enumerate_threads

import pytest

from cacheblend_rag.engines.lifetime import IdleJob, IdleQueue
from cacheblend_rag.engines.stream import BackgroundLoop, Cancellation
from cacheblend_rag.errors import ConfigError
from tests.engines.toy_engine import ToyEngine
from tests.kv.samples import until
from tests.models import make_tokenizer

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


def test_its_own_thread_is_refused_instead_of_waiting_for_itself() -> None:
    loop, told = BackgroundLoop("test"), list[str]()

    async def items() -> AsyncIterator[int]:
        yield 1

    async def nothing() -> None: ...

    async def work() -> None:
        stream = loop.stream(items(), Cancellation())
        for ask in (lambda: loop.run(nothing()), stream.last, lambda: list(stream)):
            with pytest.raises(ConfigError, match="in the thread that makes its answers") as error:
                ask()
            told.append(str(error.value))

    try:
        loop.start(work()).result(PATIENCE)
    finally:
        loop.close()
    assert len(told) == 3


@pytest.fixture
def toy():
    engine = ToyEngine(make_tokenizer())
    yield engine
    engine.close()


def told_by(ask):
    """What a forked process says when it does ``ask``: what it returns, or the error's name."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            told = repr(ask())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return told


ASK = {
    "generate": lambda engine: engine.generate("A question?"),
    "stream": lambda engine: list(engine.stream("A question?")),
    "precompute": lambda engine: engine.precompute(["A text."], progress=False),
}


@pytest.mark.parametrize("how", ASK)
def test_a_forked_engine_says_so_in_a_line(how, toy):
    told = told_by(lambda: ASK[how](toy))
    assert told.startswith(f"ConfigError: the engine was opened in process {os.getpid()}, ")
    assert "open an engine in process" in told
    assert "\n" not in told
    toy.generate("A question?")


def test_a_forked_engine_is_closed_at_once(toy):
    assert told_by(toy.close) == "None"
    assert toy.is_open
