"""A batch: a few requests at a time, those that share chunks next to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend_rag.engines.answer import MOST_TOGETHER, Delta, answer_batch, by_overlap
from cacheblend_rag.engines.stream import Cancellation, Stream, Take
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey
from tests.kv.samples import make_key

PATIENCE = 30.0


def chunks(*numbers: int) -> dict[KVKey, int]:
    return {make_key(number): 10 for number in numbers}


def test_those_that_share_chunks_stand_together() -> None:
    assert by_overlap([chunks(3, 4), chunks(), chunks(1), chunks(2)]) == [0, 1, 2, 3]
    prompts = [chunks(1, 2), chunks(8, 9), chunks(2, 1), chunks(5), chunks(9, 8), chunks(1, 2)]
    assert by_overlap(prompts) == [0, 2, 5, 1, 4, 3]


@dataclass(eq=False)
class Request:
    """What ``answer_batch`` reads of a request; its answer is its name, once ``work`` is done."""

    name: int
    work: Callable[[Request], None] = lambda _: None
    cancel: Cancellation = field(default_factory=Cancellation)
    prepared: Any = field(default_factory=lambda: SimpleNamespace(placed=()))


class Engine:
    """Answers each request in a thread; begun: their names, in order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def start(self, request: Request) -> Stream[Delta]:
        def begin(take: Take[Delta]) -> Future[Delta]:
            self.begun.append(request.name)
            pool = ThreadPoolExecutor(1)
            done = pool.submit(self._answer, request)
            pool.shutdown(wait=False)
            return done

        return Stream(begin, request.cancel)

    def _answer(self, request: Request) -> Delta:
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            request.work(request)
        finally:
            with self._lock:
                self.running -= 1
        return Delta("", request.name)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def answer(engine: Engine, requests: list[Request]) -> Any:
    return answer_batch(engine.start, requests)


def test_answers_come_in_the_order_of_requests_few_at_a_time(engine: Engine) -> None:
    count = 3 * MOST_TOGETHER + 1
    many = threading.Event()

    def work(_: Request) -> None:
        if len(engine.begun) >= MOST_TOGETHER:
            many.set()
        assert many.wait(PATIENCE)

    assert answer(engine, [Request(name, work) for name in range(count)]) == list(range(count))
    assert engine.most_running == MOST_TOGETHER
    assert engine.begun == list(range(count))
    assert answer(engine, []) == []


def test_an_error_cancels_the_others_and_is_raised(engine: Engine) -> None:
    def work(request: Request) -> None:
        if request.name == 1:
            raise RuntimeError("broken")
        while not request.cancel.is_set():
            threading.Event().wait(0.001)

    requests = [Request(name, work) for name in range(MOST_TOGETHER + 2)]
    with pytest.raises(RuntimeError, match="broken"):
        answer(engine, requests)
    assert all(request.cancel.is_set() for request in requests)
    assert len(engine.begun) == MOST_TOGETHER, "no other one is begun"


def test_what_finds_no_memory_beside_the_others_is_answered_after_them(engine: Engine) -> None:
    def work(request: Request) -> None:
        if request.name == 1 and engine.begun.count(1) == 1:
            raise OutOfMemoryError("no memory")

    assert answer(engine, [Request(name, work) for name in range(3)]) == [0, 1, 2]
    assert engine.begun == [0, 1, 2, 1]
