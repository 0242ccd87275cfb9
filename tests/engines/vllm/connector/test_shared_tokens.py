"""Replicas find what one of them has stored, by a folder, Redis or S3; and Redis that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis as client_library

from cacheblend_rag.engines.vllm.connector import finder as finder_module
from cacheblend_rag.engines.vllm.connector import (
    shared_log,
    stored_tokens,
    token_objects,
    token_stream,
)
from cacheblend_rag.engines.vllm.connector.finder import Finder
from cacheblend_rag.engines.vllm.connector.finding import place_of
from cacheblend_rag.engines.vllm.connector.stored_tokens import StoredTokens
from cacheblend_rag.engines.vllm.connector.token_file import FILE_NAME
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.settings.tier_url import TierUrl
from tests.engines.vllm.connector.test_finder import (
    BARE,
    DOCUMENT,
    FIRST,
    OTHER,
    SECOND,
    THIRD,
    found,
    ids,
    job,
    learn,
    waited,
)
from tests.local_servers import Server, redis_server
from tests.servers import redis, redis_place, s3_place  # noqa: F401 - a fixture


class Fleet:
    """Finders that share a place on a Redis server."""

    def __init__(self, server: Server, options: str = "timeout=1") -> None:
        self.server, self.url = server, TierUrl(redis_place(server, options))
        self.client = client_library.Redis(port=server.port)
        self.made: list[Finder] = []
        self.start = f"{self.url.options['prefix']}tokens:m:"
        self.chunks, self.names = f"{self.start}chunks", f"{self.start}names"

    def open(self, model: str = "m", **options: Any) -> Finder:
        self.made.append(Finder(self.url, lambda: model, **options))
        assert self.made[-1].settle()
        return self.made[-1]

    def close(self) -> None:
        for one in self.made:
            one.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(token_objects, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr("cacheblend_rag.kv.tiers.breaker.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("cacheblend_rag.kv.tiers.breaker.MOST_SECONDS", 0.1)


@pytest.fixture
def fleet(redis: Server) -> Iterator[Fleet]:  # noqa: F811
    with closing(Fleet(redis)) as made:
        yield made


@pytest.fixture
def own_fleet() -> Iterator[Fleet]:
    """One whose server may be ended."""
    with redis_server() as server, closing(Fleet(server)) as made:
        yield made


Open = Callable[..., Finder]


@pytest.fixture(params=["folder", "redis", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Open finders over one place that keeps tokens."""
    places: dict[str, Callable[[], Path | TierUrl]] = {
        "folder": lambda: tmp_path / FILE_NAME,
        "redis": lambda: TierUrl(redis_place(request.getfixturevalue("redis"), "timeout=1")),
        "s3": lambda: TierUrl(s3_place(request.getfixturevalue("s3"), "timeout=5").rstrip("&?")),
    }
    place, made = places[request.param](), list[Finder]()

    def open_finder(model: str = "m", **options: Any) -> Finder:
        made.append(Finder(place, lambda: model, **options))
        assert made[-1].settle()
        return made[-1]

    yield open_finder
    for one in made:
        one.close()


def test_replicas_tell_each_other(opened: Open) -> None:
    one, other = opened(), opened()
    learn(one, job(FIRST, SECOND))
    learn(one, job(OTHER), "tenant")
    waited(lambda: len(found(other, FIRST, SECOND)) == 2)
    waited(lambda: ids(found(other, OTHER, namespace="tenant")) == [chunk_id(OTHER)])
    assert found(other, OTHER) == found(opened("another model"), FIRST) == []
    first = found(one, FIRST)[0].generation
    learn(other, job(FIRST))
    assert found(one, FIRST)[0].generation == first, "it was stored already"
    other.forget("default", BARE, [(chunk_id(FIRST), "")])
    waited(lambda: ids(found(one, FIRST, SECOND)) == [chunk_id(SECOND)])
    learn(other, job(FIRST, SECOND), fresh=(0, 1))
    waited(lambda: len(found(one, FIRST)) == 1)
    assert found(one, FIRST)[0].generation != first


def test_a_store_that_is_only_read_changes_nothing_there(opened: Open) -> None:
    reader = opened(read_only=True)
    learn(reader, job(THIRD))
    assert found(opened(), THIRD) == []
    learn(opened(), job(FIRST, SECOND))
    waited(lambda: len(found(reader, FIRST, SECOND)) == 2)
    reader.forget("default", BARE, [(chunk_id(FIRST), "")])
    assert reader.settle()
    assert ids(found(reader, FIRST, SECOND, THIRD)) == [chunk_id(SECOND), chunk_id(THIRD)]
    assert ids(found(opened(), FIRST, SECOND, THIRD)) == [chunk_id(FIRST), chunk_id(SECOND)]


def test_a_restart_finds_what_was_not_forgotten(fleet: Fleet) -> None:
    first = fleet.open()
    learn(first, job(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    first.forget("default", DOCUMENT, [(chunk_id(FIRST), "")])
    first.close()
    told = found(fleet.open(), FIRST, SECOND, THIRD)
    assert [(one.name.chunk_id, one.sent.protected) for one in told] == [
        (chunk_id(SECOND), True),
        (chunk_id(THIRD), True),
    ]
    assert found(fleet.open("another model"), FIRST, SECOND) == []
    forgotten = b"".join(bytes([n & 255, n >> 8, 0, 0]) for n in FIRST)
    kept = [fields[b"tokens"] for _, fields in fleet.client.xrange(fleet.chunks)]
    assert len(kept) == 2
    assert forgotten not in kept


def test_many_chunks_come_in_pages(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "PAGE_BYTES", 400)
    monkeypatch.setattr(token_stream, "ROWS_AT_ONCE", 5)
    many = [tuple(range(n * 100, n * 100 + 40)) for n in range(23)]
    learn(fleet.open(), job(*many))
    assert ids(found(fleet.open(), *many)) == [chunk_id(one) for one in many]


def test_no_more_is_kept_than_there_is_room_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learn(fleet.open(), job(FIRST, SECOND, THIRD))
    monkeypatch.setattr(stored_tokens, "MOST_KEPT", 2 * stored_tokens.LEAST_COUNTED)
    assert ids(found(fleet.open(), FIRST, SECOND, THIRD)) == [chunk_id(FIRST), chunk_id(SECOND)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "change",
    [
        {"name": b"no name"},
        {"name": b"\xff" * 40},
        {"name": "+"},
        {"follows": b"elsewhere"},
        {"tokens": b""},
        {"tokens": b"\1\0\0"},
        {"tokens": b"\1\0\0\0" * 40},
        {"tokens": bytes(3 * token_stream.ROW_BYTES)},
        {"more": b"1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_entry_that_is_not_ours_is_left_out(
    fleet: Fleet, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    learn(fleet.open(), job(FIRST, SECOND))
    [(row, fields), _] = fleet.client.xrange(fleet.chunks)
    if change == {"name": "+"}:
        change = {"name": fields[b"name"] + b"0"}  # another spelling of the window
    own = {key.decode(): value for key, value in fields.items()}
    fleet.client.xdel(fleet.chunks, row)
    fleet.client.xadd(fleet.chunks, {**own, **change})
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(SECOND)]
    learn(fleet.open(), job(FIRST))
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(FIRST), chunk_id(SECOND)]
    assert caplog.records == []


def test_a_forged_name_removes_no_other_chunk(fleet: Fleet) -> None:
    learn(fleet.open(), job(FIRST, SECOND))
    [(_, first), (second, _)] = fleet.client.xrange(fleet.chunks)
    fleet.client.hset(fleet.names, first[b"name"], second)
    fleet.open().forget("default", BARE, [(chunk_id(FIRST), "")])
    assert fleet.made[-1].settle()
    assert chunk_id(SECOND) in ids(found(fleet.open(), FIRST, SECOND))


def test_what_is_no_stream_is_one_warning(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.client.set(fleet.chunks, "no stream")
    finder = fleet.open()
    learn(finder, job(FIRST))
    learn(finder, job(SECOND), fresh=(0,))
    assert len(found(finder, FIRST, SECOND)) == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    fleet.client.delete(fleet.chunks)
    waited(lambda: len(found(fleet.made[0], FIRST, SECOND)) == 2)
    other = fleet.open()
    waited(lambda: len(found(other, FIRST, SECOND)) == 2)


def test_a_dead_server_is_one_warning_and_loses_nothing(
    own_fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The server keeps nothing on disk: what it lost is told to it again."""
    one, other = own_fleet.open(), own_fleet.open()
    learn(one, job(FIRST, SECOND))
    waited(lambda: len(found(other, FIRST, SECOND)) == 2)
    own_fleet.server.kill()
    learn(one, job(THIRD))
    one.forget("default", BARE, [(chunk_id(SECOND), "")])
    late = own_fleet.open()
    assert ids(found(one, FIRST, SECOND, THIRD)) == [chunk_id(FIRST), chunk_id(THIRD)]
    assert len(found(other, FIRST, SECOND)) == 2
    waited(lambda: len(caplog.records) == 3)
    own_fleet.server.start()
    waited(lambda: {chunk_id(FIRST), chunk_id(THIRD)} <= set(ids(found(late, FIRST, THIRD))))
    waited(lambda: chunk_id(THIRD) in ids(found(other, FIRST, THIRD)))
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 3


def test_a_server_that_hangs_makes_no_prompt_wait(own_fleet: Fleet) -> None:
    finder = own_fleet.open()
    learn(finder, job(FIRST))
    own_fleet.server.pause()
    try:
        finder.forget("default", BARE, [(chunk_id(FIRST), "")])
        assert found(finder, FIRST) == [], "at once"
        learn(finder, job(SECOND))
        assert ids(found(finder, SECOND)) == [chunk_id(SECOND)]
    finally:
        own_fleet.server.resume()
    other = own_fleet.open()
    waited(lambda: ids(found(other, FIRST, SECOND)) == [chunk_id(SECOND)])


def test_only_so_many_changes_wait_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        """A log that cannot be reached; what came to it once it can."""

        is_dead, told = True, ()

        def news(self) -> Iterator[Any]:
            return iter(())

        def add(self, stored: Any, fresh: Any) -> bool:
            if self.is_dead:
                raise OSError("away")
            self.told = (*self.told, *stored)
            return True

    monkeypatch.setattr(shared_log, "MOST_WAITING", 3)
    chunks: list[StoredTokens] = [object() for _ in range(5)]  # type: ignore[misc]
    dead = Dead()
    log = shared_log.SharedLog(dead, "redis")  # type: ignore[arg-type]
    assert list(log.news()) == []
    assert [log.add([one]) for one in chunks] == [False] * 5
    dead.is_dead = False
    waited(log._write)
    assert dead.told == tuple(chunks[2:])


def test_a_password_is_in_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server("--requirepass", "well-hidden") as server:
        right = TierUrl(f"redis://:well-hidden@127.0.0.1:{server.port}/0")
        with closing(Finder(right, lambda: "m")) as finder:
            learn(finder, job(FIRST))
        bare = TierUrl(f"redis://127.0.0.1:{server.port}/0")
        monkeypatch.setenv(bare.variable, "well-hidden")
        with closing(Finder(bare, lambda: "m")) as finder:
            assert finder.settle()
            assert len(found(finder, FIRST)) == 1
        assert "not found in prompts" not in caplog.text
        wrong = TierUrl(f"redis://:badly-hidden@127.0.0.1:{server.port}/0")
        with closing(Finder(wrong, lambda: "m")) as finder:
            learn(finder, job(FIRST))
            assert len(found(finder, FIRST)) == 1
    assert "not found in prompts for now" in caplog.text
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("store", "place"),
    [
        ({}, None),
        ({"kv_path": "/kv"}, Path("/kv/tokens.sqlite")),
        ({"kv_path": "/kv", "tiers": "host://"}, None),
        ({"kv_path": "/kv", "tiers": "host://,s3://bucket/kv"}, "s3://bucket/kv"),
        ({"tiers": "host://,s3://bucket/kv,redis://one:6379/0"}, "redis://one:6379/0"),
        ({"kv_path": "/kv", "tiers": "disk:///kv,file:///objects"}, "file:///objects"),
        ({"kv_path": "/kv", "tiers": "disk:///kv,memory://"}, Path("/kv/tokens.sqlite")),
        ({"tiers": "host://,memory://"}, None),
        ({"tiers": "host://,redis://one:6379/0,redis://two:6379/0"}, "redis://one:6379/0"),
        ({"kv_path": "/kv", "tiers": "host://,unix:///run/redis.sock"}, "unix:///run/redis.sock"),
    ],
)
def test_a_shared_tier_keeps_them_where_there_is_one(store: dict[str, Any], place: object) -> None:
    assert place_of(StoreConfig(**store)) == place
