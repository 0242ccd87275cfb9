"""Replicas that share an object store, and nothing else, find what one of them has stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cacheblend_rag.engines.vllm.connector import finder as finder_module
from cacheblend_rag.engines.vllm.connector import token_objects, token_rows, token_segment
from cacheblend_rag.engines.vllm.connector.finder import Finder
from cacheblend_rag.engines.vllm.connector.stored_tokens import Name, StoredTokens, id_of
from cacheblend_rag.engines.vllm.connector.token_objects import ObjectTokens
from cacheblend_rag.kv import mac
from cacheblend_rag.kv.chunk_kv import chunk_id, namespace_id
from cacheblend_rag.kv.tiers.object_client import ObjectClient
from cacheblend_rag.kv.tiers.urls import object_store
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
)
from tests.kv.samples import until
from tests.local_servers import BUCKET, HOST, Server, s3_server
from tests.servers import s3, s3_place  # noqa: F401 - a fixture

FOLDER = "tokens/m/"


class Place:
    """A place in an object store, and what is in it."""

    def __init__(self, url: str) -> None:
        self.url = TierUrl(url.rstrip("&?"))
        self.client = ObjectClient(object_store(self.url))

    def names(self, start: str = "0") -> list[str]:
        """The paths of objects, those with tokens by default."""
        paths = [meta["path"] for page in self.client.pages(FOLDER) for meta in page]
        return sorted(path for path in paths if path.startswith(FOLDER + start))

    def data(self, path: str) -> bytes:
        [data] = self.client.read_many([path], 1 << 30)
        assert isinstance(data, bytes)
        return data

    def all(self) -> dict[str, bytes]:
        """The objects with tokens; those that are deleted meanwhile are left out."""
        names = self.names()
        read = zip(names, self.client.read_many(names, 1 << 30), strict=True)
        return {name: data for name, data in read if isinstance(data, bytes)}

    def chunks(self) -> list[str]:
        """The ids of chunks whose tokens are in any object."""
        told = [token_segment.decode(*one, mac.CHECKSUM) for one in self.all().items()]
        return sorted(one.stored.name.chunk_id for segment in told for one in segment.added)


class Fleet(Place):
    """Finders that share a place."""

    def __init__(self, server: Server, options: str = "timeout=5") -> None:
        super().__init__(s3_place(server, options))
        self.server = server
        self.made: list[Finder] = []

    def open(self, model: str = "m", **options: Any) -> Finder:
        self.made.append(Finder(self.url, lambda: model, **options))
        assert self.made[-1].settle()
        return self.made[-1]

    def close(self) -> None:
        for one in self.made:
            one.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(token_objects, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr("cacheblend_rag.kv.tiers.breaker.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("cacheblend_rag.kv.tiers.breaker.MOST_SECONDS", 0.1)


@pytest.fixture
def fleet(s3: Server) -> Iterator[Fleet]:  # noqa: F811
    with closing(Fleet(s3)) as made:
        yield made


def waited(check: Callable[[], object]) -> None:
    assert until(check, 20)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_restart_finds_what_was_not_forgotten(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet.open()
    learn(first, job(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    first.forget("default", DOCUMENT, [(chunk_id(FIRST), "")])
    first.close()
    assert fleet.chunks() == sorted([chunk_id(SECOND), chunk_id(THIRD)]), "its tokens are gone"
    second = fleet.open()
    told = found(second, FIRST, SECOND, THIRD)
    assert [(one.name.chunk_id, one.sent.protected) for one in told] == [
        (chunk_id(SECOND), True),
        (chunk_id(THIRD), True),
    ]
    assert found(fleet.open("another model"), FIRST, SECOND) == []
    monkeypatch.setattr(token_objects, "OWN_SECONDS", 0.1)
    second.forget("default", DOCUMENT, [(chunk_id(SECOND), told[0].name.context_id)])
    waited(lambda: fleet.chunks() == [chunk_id(THIRD)])


def _flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
    "change",
    [_flip, lambda data: data[:-1], lambda _: b"rubbish", lambda data: data + bytes(1 << 24)],
    ids=["a bit", "cut short", "rubbish", "too large"],
)
def test_a_damaged_object_is_left_out(
    fleet: Fleet, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    one = fleet.open()
    learn(one, job(FIRST))
    learn(one, job(SECOND))
    damaged, sound = fleet.names()
    fleet.client.put(damaged, [change(fleet.data(damaged))])
    fleet.client.put(f"{FOLDER}elsewhere", [b"no object of ours"])
    later = fleet.open()
    assert ids(found(later, FIRST, SECOND)) == [chunk_id(SECOND)]
    learn(later, job(FIRST))
    waited(lambda: len(found(one, FIRST, SECOND)) == 2)
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(FIRST), chunk_id(SECOND)]
    told = warnings(caplog)
    assert len(told) == 2, "one from each that read it"
    assert all(damaged in text and "\n" not in text for text in told)
    assert sound in fleet.names()


def test_with_a_key_only_what_is_signed_counts(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learn(fleet.open(), job(FIRST))
    monkeypatch.setenv(mac.VARIABLE, "a key of many characters")
    one = fleet.open()
    assert found(one, FIRST) == []
    learn(one, job(SECOND))
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(SECOND)]
    monkeypatch.delenv(mac.VARIABLE)
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(FIRST)]
    assert "many characters" not in caplog.text
    assert all("a digest of the kind" in text for text in warnings(caplog))


def test_many_objects_are_merged_and_nobody_notices(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_objects, "OWN_SECONDS", 0.1)
    one, other = fleet.open(), fleet.open()
    many = [tuple(range(n * 100, n * 100 + 40)) for n in range(1, 9)]
    for chunk in many[:6]:
        learn(one, job(chunk))
    waited(lambda: len(found(other, *many)) == 6)
    before = found(other, *many)
    other.forget("default", BARE, [(chunk_id(many[0]), "")])
    assert other.settle()
    monkeypatch.setattr(token_rows, "MERGE_AT", 4)
    waited(lambda: len(fleet.names()) < 4)
    learn(other, job(many[6]))
    waited(lambda: len(found(one, *many)) == 6)
    assert [one.at[:2] for one in found(other, *many)[:5]] == [one.at[:2] for one in before[1:]]
    assert ids(found(fleet.open(), *many)) == [chunk_id(one) for one in many[1:7]]
    assert warnings(caplog) == []


def test_a_store_that_hangs_is_one_warning_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with s3_server() as server, closing(Fleet(server, "timeout=1")) as fleet:
        one, other = fleet.open(), fleet.open()
        learn(one, job(FIRST, SECOND))
        waited(lambda: len(found(other, FIRST, SECOND)) == 2)
        server.pause()
        try:
            one.forget("default", BARE, [(chunk_id(FIRST), "")])
            assert ids(found(one, FIRST, SECOND)) == [chunk_id(SECOND)], "at once"
            learn(one, job(THIRD))
            assert len(found(one, SECOND, THIRD)) == 2
            late = fleet.open()
            learn(late, job(OTHER))
            waited(lambda: len(warnings(caplog)) == 3)
            for _ in range(3):
                assert all(finder.settle() for finder in (one, other, late))
            assert len(warnings(caplog)) == 3, "one of each replica, however often it is tried"
        finally:
            server.resume()
        everything = (FIRST, SECOND, THIRD, OTHER)
        for finder in (one, other, late):
            waited(lambda finder=finder: len(found(finder, *everything)) == 3)  # type: ignore[misc]


def test_a_store_that_lost_everything_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    """moto keeps nothing on disk."""
    with s3_server() as server, closing(Fleet(server)) as fleet:
        one, other = fleet.open(), fleet.open()
        learn(one, job(FIRST, SECOND))
        waited(lambda: len(found(other, FIRST, SECOND)) == 2)
        server.kill()
        learn(one, job(THIRD))
        waited(lambda: len(warnings(caplog)) == 2)
        server.start()
        with closing(HTTPConnection(HOST, server.port, timeout=60)) as made:
            made.request("PUT", f"/{BUCKET}")
            assert made.getresponse().status == 200
        waited(lambda: set(fleet.chunks()) == {chunk_id(c) for c in (FIRST, SECOND, THIRD)})
        waited(lambda: len(found(other, FIRST, SECOND, THIRD)) == 3)
        assert len(found(fleet.open(), FIRST, SECOND, THIRD)) == 3
        assert len(warnings(caplog)) == 2


# The log itself, in a folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, seconds in {"LOOK_SECONDS": 0.0, "OWN_SECONDS": 0.0}.items():
        monkeypatch.setattr(token_objects, name, seconds)
    monkeypatch.setattr(token_objects, "OTHERS_SECONDS", (0.0, 0.0))
    return Place((tmp_path / "objects").as_uri())


def chunk(number: int) -> StoredTokens:
    tokens = np.arange(100 * number, 100 * number + 40, dtype=np.uint32)
    return StoredTokens(Name(namespace_id("default"), id_of(tokens), "", BARE), tokens)


def names(log: ObjectTokens, known: set[Name] | None = None) -> set[Name]:
    """What is known after ``known`` by a log's news."""
    rows: dict[Any, Name] = {}
    known = set() if known is None else known
    for told in log.news():
        for row, one in told.items():
            if one is not None:
                rows[row] = one.name
                known.add(one.name)
            elif row in rows:
                known.discard(rows[row])
    return known


def opened(place: Place, **options: Any) -> ObjectTokens:
    log = ObjectTokens(place.url, "m", **options)
    assert not log.has_lost()
    return log


def filled(place: Place, several: int) -> ObjectTokens:
    log = opened(place)
    list(log.news())
    for number in range(several):
        log.add([chunk(number)])
    return log


def test_who_is_ended_while_merging_leaves_no_copies_for_long(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_rows, "MERGE_AT", 5)
    writer = filled(place, 6)
    delete = writer._client.delete

    def fails(path: str) -> None:
        if path in place.names():
            raise OSError("ended")
        delete(path)

    monkeypatch.setattr(writer._client, "delete", fails)
    for _ in range(3):
        list(writer.news())
    assert len(place.chunks()) == 12, "it tries that once"
    assert len(warnings(caplog)) == 1
    other = opened(place)
    expected = {chunk(n).name for n in range(6)}
    for _ in range(3):
        assert names(other, set(expected)) == expected
    assert len(place.chunks()) == 6
    assert names(opened(place)) == expected


def test_a_folder_of_too_many_objects_is_read_no_further(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(place, 4)
    monkeypatch.setattr(token_objects, "MOST_OBJECTS", 3)
    with pytest.raises(OSError, match="more than 3 objects"):
        names(opened(place))
