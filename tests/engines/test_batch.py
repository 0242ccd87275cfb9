"""A batch's first pieces are read one after another, the rest together, a few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend_rag.engines.answer import Delta
from cacheblend_rag.engines.batch import answer_batch
from cacheblend_rag.engines.batch_order import MOST_TOGETHER
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk
from tests.kv.samples import make_key


def nothing(_: Request) -> None:
    pass


@dataclass(eq=False)
class Request:
    """What ``answer_batch`` reads of a request; each of its pieces first calls ``work``."""

    name: int
    log: Log
    work: Callable[[Request], None] = nothing
    cancel: Cancellation = field(default_factory=Cancellation)
    prepared: Any = field(default_factory=lambda: SimpleNamespace(placed=()))

    def pieces(self) -> Iterator[Delta]:
        self.log.note("prefill", self)
        yield Delta("a")
        for _ in range(3):
            self.log.note("decode", self)
            self.work(self)
            yield Delta("b")
        yield Delta("", self.name)  # type: ignore[arg-type]
        self.log.note("end", self)


class Log:
    """What requests did, in order; open: how many are between their first piece and their end."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.open = self.most_open = 0
        self.threads: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def note(self, event: str, request: Request) -> None:
        with self._lock:
            self.events.append((event, request.name))
            self.open += {"prefill": 1, "decode": 0, "end": -1}[event]
            self.most_open = max(self.most_open, self.open)
            self.threads.add((event, threading.get_ident()))


class Pieces:
    """As much of a Stream as is read."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __iter__(self) -> Iterator[Delta]:
        return self._request.pieces()

    def last(self) -> Delta:
        *_, last = self
        return last


def answer(requests: list[Request], wanting: Any = lambda keys: nullcontext()) -> Any:
    start: Any = Pieces
    return answer_batch(start, requests, wanting)  # type: ignore[arg-type]


def asking_for(*numbers: int) -> Any:
    """A prepared prompt with these chunks."""
    return SimpleNamespace(
        placed=[PlacedChunk(make_key(n), 10 * at, 10 * at + 10) for at, n in enumerate(numbers)]
    )


def test_a_group_announces_what_its_requests_share_until_each_is_prefilled() -> None:
    """The first eight share chunk 0 and, two of them, chunk 1; the next group is announced then."""
    log, announced = Log(), dict[KVKey, int]()
    seen: dict[int, dict[KVKey, int]] = {}

    class Noting(Log):
        def note(self, event: str, request: Request) -> None:
            super().note(event, request)
            if event == "prefill":
                seen[request.name] = {key: n for key, n in announced.items() if n}

    @contextmanager
    def wanting(keys: Any) -> Iterator[None]:
        for key in keys:
            announced[key] = announced.get(key, 0) + 1
        yield
        for key in keys:
            announced[key] -= 1

    log = Noting()
    first = [Request(n, log, prepared=asking_for(0, 10 + n)) for n in range(MOST_TOGETHER)]
    first[1].prepared, first[2].prepared = asking_for(0, 1), asking_for(1, 0)
    last = [Request(90 + n, log, prepared=asking_for(3)) for n in range(2)]
    answer([*first, *last], wanting)
    order = [name for event, name in log.events if event == "prefill"]
    assert sorted(order[:MOST_TOGETHER]) == list(range(MOST_TOGETHER))
    both, own = make_key(0), make_key(1)
    for before, name in enumerate(order[:MOST_TOGETHER]):
        two_left = 2 - sum(other in order[:before] for other in (1, 2))
        told = {both: MOST_TOGETHER - before, own: two_left}
        assert seen[name] == {key: left for key, left in told.items() if left}
    assert [seen[name] for name in (90, 91)] == [{make_key(3): 2}, {make_key(3): 1}]
    assert not any(announced.values())


def test_an_error_ends_all_announcements() -> None:
    log, open_now = Log(), []

    @contextmanager
    def wanting(keys: Any) -> Iterator[None]:
        open_now.append(list(keys))
        try:
            yield
        finally:
            open_now.pop()

    def break_down(_: Request) -> None:
        raise RuntimeError("broken")

    requests = [Request(n, log, break_down, prepared=asking_for(0)) for n in range(12)]
    with pytest.raises(RuntimeError, match="broken"):
        answer(requests, wanting)
    assert open_now == []


def test_no_more_than_a_few_are_open_at_a_time() -> None:
    log = Log()
    count = 3 * MOST_TOGETHER + 1
    assert answer([Request(name, log) for name in range(count)]) == list(range(count))
    assert log.most_open == MOST_TOGETHER
    assert [name for event, name in log.events if event == "prefill"] == list(range(count))


def test_an_error_cancels_the_others_and_is_raised() -> None:
    log = Log()

    def work(request: Request) -> None:
        if request.name == 1:
            raise RuntimeError("broken")
        while not request.cancel.is_set():
            threading.Event().wait(0.001)

    requests = [Request(name, log, work) for name in range(MOST_TOGETHER + 2)]
    with pytest.raises(RuntimeError, match="broken"):
        answer(requests)
    assert all(request.cancel.is_set() for request in requests)
    assert ("prefill", MOST_TOGETHER) not in log.events, "no other one is begun"


def test_lack_of_memory_that_stays_is_raised() -> None:
    log = Log()

    def work(request: Request) -> None:
        if request.name == 1:
            raise OutOfMemoryError("no memory")

    requests = [Request(name, log, work) for name in range(3)]
    with pytest.raises(OutOfMemoryError, match="no memory"):
        answer(requests)
    assert all(request.cancel.is_set() for request in requests)
