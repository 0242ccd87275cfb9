import threading
import time

import pytest

from tests.servers import redis, redis_socket, redis_tls, s3  # noqa: F401 - fixtures


class Clock:
    """Stands in for time.time: starts now, moves only when told."""

    def __init__(self):
        self.now = time.time()

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.time", lambda: clock.now)
    monkeypatch.setattr("time.time_ns", lambda: int(clock.now * 1e9))
    return clock


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()
