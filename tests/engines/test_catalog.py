"""Servers that share a folder, a Redis or an S3 bucket find what one of them has stored."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.engines import catalog, catalog_places
from cacheblend_rag.engines import finder as finder_module
from cacheblend_rag.engines.catalog import Catalog, encoded
from cacheblend_rag.engines.catalog_places import InFolder, InObjects, Place, open_place, place_of
from cacheblend_rag.engines.finder import Finder
from cacheblend_rag.kv import mac
from cacheblend_rag.kv.chunk_kv import chunk_id, namespace_id
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.token_index import TokenIndex
from tests.engines.test_finder import (
    BARE,
    DOCUMENT,
    FIRST,
    OTHER,
    SECOND,
    THIRD,
    VOCABULARY,
    found,
    ids,
    learn,
    run,
)
from tests.kv.samples import until
from tests.local_servers import Server, redis_server, s3_server
from tests.servers import redis, redis_place, s3, s3_place  # noqa: F401 - fixtures

EVERYTHING = (FIRST, SECOND, THIRD, OTHER)


class Fleet:
    """Finders that share a place."""

    def __init__(self, where: Path | TierUrl, server: Server | None = None) -> None:
        self.where, self.server = where, server
        self.made: list[Finder] = []

    def place(self, model: str = "m") -> Place:
        return open_place(self.where, model)

    def open(self, model: str = "m", *, read_only: bool = False, **options: Any) -> Finder:
        def opened() -> Catalog:
            return Catalog(self.place(model), mac.mac_of(), read_only=read_only)

        self.made.append(Finder(opened, vocabulary=lambda: VOCABULARY, **options))
        assert self.made[-1].settle()
        return self.made[-1]

    def close(self) -> None:
        for one in self.made:
            one.close()

    def records(self) -> dict[str, bytes]:
        names = sorted(self.place().names() or ())
        return dict(self.place().read(names))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "REFRESH_SECONDS", 0.02)
    for place in (Place, InObjects):
        monkeypatch.setattr(place, "seconds", 0.05)
    monkeypatch.setattr("cacheblend_rag.kv.tiers.breaker.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("cacheblend_rag.kv.tiers.breaker.MOST_SECONDS", 0.1)


def at_redis(server: Server) -> TierUrl:
    return TierUrl(redis_place(server, "timeout=1"))


def at_s3(server: Server) -> TierUrl:
    return TierUrl(s3_place(server, "timeout=1").rstrip("&?"))


@pytest.fixture(params=["folder", "redis", "s3"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    places: dict[str, Callable[[], Path | TierUrl]] = {
        "folder": lambda: tmp_path,
        "redis": lambda: at_redis(request.getfixturevalue("redis")),
        "s3": lambda: at_s3(request.getfixturevalue("s3")),
    }
    with closing(Fleet(places[request.param]())) as made:
        yield made


@pytest.fixture(params=["redis", "s3"])
def own_fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """One whose server may be ended."""
    starts, at = {"redis": (redis_server, at_redis), "s3": (s3_server, at_s3)}[request.param]
    with starts() as server, closing(Fleet(at(server), server)) as made:
        yield made


def waited(check: Callable[[], object]) -> None:
    assert until(check, 20)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def forget(finder: Finder, *chunks: Sequence[int], lead_in: Any = BARE) -> None:
    finder.forget("default", lead_in, [(chunk_id(one), "") for one in chunks])
    assert finder.settle()


# What one stores, others find


def test_servers_tell_each_other(fleet: Fleet) -> None:
    one, other = fleet.open(), fleet.open()
    learn(one, run(FIRST, SECOND))
    learn(one, run(OTHER), "tenant")
    waited(lambda: len(found(other, FIRST, SECOND)) == 2)
    waited(lambda: ids(found(other, OTHER, namespace="tenant")) == [chunk_id(OTHER)])
    assert found(other, OTHER) == found(fleet.open("another"), FIRST) == []
    kept = fleet.records()
    learn(other, run(FIRST, SECOND))
    assert fleet.records() == kept, "it is known already"
    [before] = found(one, FIRST)
    forget(other, FIRST)
    waited(lambda: ids(found(one, FIRST, SECOND)) == [chunk_id(SECOND)])
    learn(other, run(FIRST), fresh=(0,))
    waited(lambda: len(found(one, FIRST)) == 1)
    assert found(one, FIRST)[0].at != before.at, "nothing blended before is used again"


def test_a_restart_finds_what_was_not_deleted(fleet: Fleet) -> None:
    first = fleet.open()
    learn(first, run(FIRST, SECOND, THIRD, lead_in=DOCUMENT))
    forget(first, FIRST, lead_in=DOCUMENT)
    first.close()
    told = found(fleet.open(), FIRST, SECOND, THIRD)
    assert [(one.name.chunk_id, one.protected) for one in told] == [
        (chunk_id(SECOND), True),
        (chunk_id(THIRD), True),
    ]
    [kept] = fleet.records().values()
    forgotten, left = (b"".join(n.to_bytes(4, "little") for n in c) for c in (FIRST, SECOND))
    assert forgotten not in kept, "its tokens are gone"
    assert left in kept
    assert b"default" not in kept


def test_a_store_that_is_only_read_changes_nothing_there(fleet: Fleet) -> None:
    reader = fleet.open(read_only=True)
    learn(reader, run(THIRD))
    assert found(fleet.open(), THIRD) == []
    learn(fleet.open(), run(FIRST, SECOND))
    waited(lambda: len(found(reader, FIRST, SECOND)) == 2)
    forget(reader, FIRST)
    for _ in range(5):
        assert reader.settle()
    assert ids(found(reader, FIRST, SECOND, THIRD)) == [chunk_id(SECOND), chunk_id(THIRD)]
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(FIRST), chunk_id(SECOND)]


# What is there is not trusted


def sealed(content: bytes, key: mac.Mac = mac.CHECKSUM, folder: str = "tokens/m/") -> Any:
    """A record's name and object, as whoever knows the format may write them."""
    name = catalog.record_name(content)
    digest = key.digest(f"{folder}{name}\n".encode(), content)
    return name, f"{key.name} {digest}\n".encode() + content


def content_of(*chunks: Sequence[int]) -> bytes:
    placed = run(*chunks).stored(namespace_id("default"), TokenIndex(), VOCABULARY.is_blank)
    return encoded([one for _, one in placed])


def changed(old: bytes, new: bytes) -> Any:
    content = content_of(FIRST)
    assert old in content
    return sealed(content.replace(old, new, 1))


MALFORMED: dict[str, Callable[[], Any]] = {
    "a bit": lambda: (sealed(content_of(FIRST))[0], sealed(content_of(FIRST))[1][:-1] + b"\1"),
    "cut short": lambda: sealed(content_of(FIRST)[:-4]),
    "rubbish": lambda: ("0" * 32, b"rubbish"),
    "no digest": lambda: ("0" * 32, b"xxh3 \xff\xff\n" + content_of(FIRST)),
    "another name": lambda: ("0" * 32, sealed(content_of(FIRST))[1]),
    "another model's": lambda: sealed(content_of(FIRST), folder="tokens/n/"),
    "namespace": lambda: changed(namespace_id("default").encode(), b"../up"),
    "lead-in": lambda: changed(b'"none"', b'"odd"'),
    "follows": lambda: changed(b'""]', b'"elsewhere"]'),
    "count": lambda: changed(b"[[41", b"[[-1"),
    "deep": lambda: sealed(b"[" * 100_000 + b"\n"),
    "no such token": lambda: sealed(content_of(FIRST)[:-4] + b"\xff" * 4),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_record_that_is_not_ours_is_left_out(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Fleet(tmp_path)) as fleet:
        learn(fleet.open(), run(SECOND))
        fleet.place().write(*MALFORMED[what]())
        reader = fleet.open()
        assert ids(found(reader, FIRST, SECOND)) == [chunk_id(SECOND)]
        [told] = warnings(caplog)
        assert "is left out" in told
        assert "\n" not in told
        learn(reader, run(FIRST))
        assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(FIRST), chunk_id(SECOND)]


def test_a_record_that_is_too_large_is_left_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_places, "RECORD_BYTES", 500)
    writer = fleet.open()
    learn(writer, run(FIRST, SECOND, THIRD, OTHER))
    learn(writer, run(SECOND[:35]))
    assert ids(found(fleet.open(), SECOND[:35])) == [chunk_id(SECOND[:35])]
    assert found(fleet.open(), FIRST) == []


def test_what_is_no_record_is_no_news(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    with closing(Fleet(tmp_path)) as fleet:
        learn(fleet.open(), run(FIRST))
        [(name, data)] = fleet.records().items()
        folder = tmp_path / fleet.place().folder
        assert folder.stat().st_mode & 0o077 == (folder / name).stat().st_mode & 0o077 == 0
        outside.write_bytes(data)
        (folder / name).unlink()
        (folder / name).symlink_to(outside)
        os.mkfifo(folder / ("1" * 32))
        (folder / ("2" * 32)).mkdir()
        (folder / "README").write_text("not ours")
        assert found(fleet.open(), FIRST) == []


def test_a_link_in_place_of_the_folder_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/m").symlink_to(tmp_path / "elsewhere")
    with closing(Fleet(tmp_path)) as fleet:
        finder = fleet.open()
        learn(finder, run(FIRST))
        assert len(found(finder, FIRST)) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []
    [told] = warnings(caplog)
    assert "is a link instead of the store's own folder" in told


def test_with_a_key_only_what_is_signed_counts(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learn(fleet.open(), run(FIRST))
    monkeypatch.setenv(mac.VARIABLE, "a key of many characters")
    one = fleet.open()
    assert found(one, FIRST) == []
    learn(one, run(SECOND))
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(SECOND)]
    monkeypatch.delenv(mac.VARIABLE)
    assert ids(found(fleet.open(), FIRST, SECOND)) == [chunk_id(FIRST)]
    assert "many characters" not in caplog.text
    assert all("no digest of the kind" in text for text in warnings(caplog))


# Places that fail


def test_a_server_that_hangs_is_one_warning_and_loses_nothing(
    own_fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    assert own_fleet.server is not None
    one, other = own_fleet.open(), own_fleet.open()
    learn(one, run(FIRST, SECOND))
    waited(lambda: len(found(other, FIRST, SECOND)) == 2)
    own_fleet.server.pause()
    try:
        one.forget("default", BARE, [(chunk_id(FIRST), "")])
        assert ids(found(one, FIRST, SECOND)) == [chunk_id(SECOND)], "at once"
        learn(one, run(THIRD))
        assert len(found(one, SECOND, THIRD)) == 2
        late = own_fleet.open()
        learn(late, run(OTHER))
        waited(lambda: len(warnings(caplog)) == 3)
        assert all(finder.settle() for finder in (one, other, late))
        assert len(warnings(caplog)) == 3, "one of each server, however often it is tried"
    finally:
        own_fleet.server.resume()
    for finder in (one, other, late):
        waited(lambda finder=finder: len(found(finder, *EVERYTHING)) == 3)


def test_a_redis_that_lost_all_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps nothing on disk, or has evicted the catalogue."""
    with redis_server() as server, closing(Fleet(at_redis(server), server)) as fleet:
        one, other = fleet.open(), fleet.open()
        learn(one, run(FIRST, SECOND))
        waited(lambda: len(found(other, FIRST, SECOND)) == 2)
        server.kill()
        learn(one, run(THIRD))
        waited(lambda: len(warnings(caplog)) == 2)
        server.start()
        late = fleet.open()
        for finder in (one, other, late):
            waited(lambda finder=finder: len(found(finder, FIRST, THIRD)) == 2)


def test_a_password_is_in_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server("--requirepass", "well-hidden") as server:
        for password, told in (("well", 0), ("badly", 1)):
            url = TierUrl(f"redis://:{password}-hidden@127.0.0.1:{server.port}/0")
            with closing(Fleet(url)) as fleet:
                finder = fleet.open()
                learn(finder, run(FIRST))
                assert len(found(finder, FIRST)) == 1
            assert caplog.text.count("not found in prompts for now") == told
    assert "hidden" not in caplog.text


WRITER = """
import sys
from pathlib import Path
from cacheblend_rag.engines.catalog import Catalog
from cacheblend_rag.engines.catalog_places import InFolder
from cacheblend_rag.kv.mac import CHECKSUM
from tests.engines.test_catalog import content_of
made = Catalog(InFolder(Path(sys.argv[1]), "m"), CHECKSUM)
for start in range(1, 1 << 20, 40):
    made.add(content_of(range(start, start + 40)))
"""


def test_whatever_a_killed_writer_has_written_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = InFolder(tmp_path, "m")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as writer:
        try:
            assert until(lambda: len(place.names() or ()) > 20, 60)
        finally:
            writer.kill()
    with closing(Fleet(tmp_path)) as fleet:
        reader = fleet.open()
        written = len(InFolder(tmp_path, "m").names() or ())
        assert written > 20
        for start in range(1, 40 * written, 40):
            assert len(found(reader, tuple(range(start, start + 40)))) == 1
    assert warnings(caplog) == []


def test_what_a_killed_writer_left_behind_goes(tmp_path: Path) -> None:
    place = InFolder(tmp_path, "m")
    place.write(*sealed(content_of(FIRST)))
    left = [tmp_path / place.folder / f"{'1' * 32}.{age}.tmp" for age in ("old", "new")]
    for one in left:
        one.write_bytes(b"half a record")
    os.utime(left[0], (0, 0))
    assert len(place.names() or ()) == 1
    place.write(*sealed(content_of(SECOND)))
    assert [one.exists() for one in left] == [False, True]


@pytest.mark.parametrize(
    ("store", "place"),
    [
        ({}, None),
        ({"kv_path": "/kv"}, Path("/kv")),
        ({"kv_path": "/kv", "tiers": "host://"}, None),
        ({"kv_path": "/kv", "tiers": "host://,s3://bucket/kv"}, "s3://bucket/kv"),
        ({"tiers": "host://,s3://bucket/kv,redis://one:6379/0"}, "redis://one:6379/0"),
        ({"kv_path": "/kv", "tiers": "disk:///kv,file:///objects"}, "file:///objects"),
        ({"kv_path": "/kv", "tiers": "disk:///kv,memory://"}, Path("/kv")),
    ],
)
def test_a_shared_tier_keeps_them_where_there_is_one(store: dict[str, Any], place: object) -> None:
    assert place_of(StoreConfig(**store)) == place
