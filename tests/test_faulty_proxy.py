"""What the proxy before a server does to a client of Redis, state by state."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.faulty_proxy import FAULTS, PASSES, FaultyProxy, State
from tests.local_servers import HOST, redis_server

VALUES = {"one": b"a" * 100, "other": b"b" * 100}


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with redis_server() as server, FaultyProxy(server.port) as proxy:
        Redis(HOST, server.port).mset(VALUES)
        yield proxy


def asked(proxy: FaultyProxy, name: str) -> object:
    options = {"socket_timeout": 0.5, "retry": Retry(NoBackoff(), 0)}
    with Redis(HOST, proxy.port, single_connection_client=True, **options) as client:
        return client.get(name)


@pytest.mark.parametrize("fault", [one for one in FAULTS if one not in ("repeats", "drips")])
def test_an_answer_does_not_come_until_the_proxy_passes_again(
    proxy: FaultyProxy, fault: State
) -> None:
    for _ in range(2):
        proxy.state = PASSES
        assert asked(proxy, "one") == VALUES["one"]
        proxy.state = fault
        with pytest.raises((RedisError, OSError, ValueError)):
            asked(proxy, "one")
    proxy.state = PASSES
    assert asked(proxy, "one") == VALUES["one"]


def test_what_was_answered_before_is_answered_to_somebody_else(proxy: FaultyProxy) -> None:
    proxy.state = PASSES
    asked(proxy, "other")
    proxy.state = "repeats"
    with socket.create_connection((HOST, proxy.port), 5) as client:
        for _ in range(3):
            client.sendall(b"GET one\r\n")
            assert client.recv(1 << 16) == b"$100\r\n" + VALUES["other"] + b"\r\n"
    proxy.state = PASSES


def test_a_byte_a_second_comes(proxy: FaultyProxy) -> None:
    proxy.state = "drips"
    with socket.create_connection((HOST, proxy.port), 5) as client:
        client.sendall(b"GET one\r\n")
        assert [client.recv(100) for _ in range(2)] == [b"$", b"1"]
    proxy.state = PASSES


def test_a_change_of_state_ends_connections(proxy: FaultyProxy) -> None:
    proxy.state = PASSES
    with socket.create_connection((HOST, proxy.port), 5) as client:
        client.sendall(b"PING\r\n")
        assert client.recv(100) == b"+PONG\r\n"
        proxy.state = PASSES
        assert client.recv(100) == b""
