"""What stands beside chunks is believed no more than they are: times, sizes, folders."""

import math
import os
import resource
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, StoredChunk, TieredKVStore, expiry
from cacheblend_rag.kv.tiers import disk as disk_module
from tests.kv.samples import chunk_files, make_key, make_kv, same, until
from tests.servers import HOST, redis_name, redis_place, tier_at

KEYS = [make_key(number) for number in range(8)]


@pytest.mark.parametrize("value", [[], b"short", struct.pack("<d", math.nan) + b"x", b"x" * 99])
def test_a_value_that_no_tier_wrote_is_one_chunks_concern(redis, value):
    tier = tier_at(redis_place(redis))
    with TieredKVStore([tier]) as store:
        for number in range(2):
            assert store.put(KEYS[number], make_kv(number))
        name = redis_name(tier, KEYS[0])
        tier.client.delete(name)
        tier.client.lpush(name, "a list") if value == [] else tier.client.set(name, value)
        tier.client.set(redis_name(tier, "nobody's"), "x")
        assert store.contains(KEYS[1])
        assert store.get(KEYS[0]).reason == "damaged"
        assert same(store.get(KEYS[1]).kv, make_kv(1))
        assert store.keys() == [KEYS[1]]
        assert store.stats()["redis"]["entries"] == 1


def test_a_stores_time_to_live_reaches_redis(redis):
    place = redis_place(redis)
    with TieredKVStore([tier_at(place)], ttl_seconds=1000) as store:
        tier = store.tiers[0]
        tier.put(KEYS[0], StoredChunk(make_kv(), time.time() - 400))
        store.pin(KEYS[1])
        store.put(KEYS[1], make_kv())
        assert 500 < tier.client.pttl(redis_name(tier, KEYS[0])) / 1000 <= 600
        assert tier.client.pttl(redis_name(tier, KEYS[1])) == -1


@pytest.mark.parametrize("written_at", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_time_that_cannot_be_is_past(written_at):
    tier = HostTier(None)
    tier.put(KEYS[0], StoredChunk(make_kv(), written_at))
    with TieredKVStore([tier], ttl_seconds=1e6) as store:
        assert not store.contains(KEYS[0])
        assert store.get(KEYS[0]).reason == "not stored"
        with store.fetch(KEYS[:1]) as source:
            assert source.take().reason == "not stored"


def test_expired_files_go_while_the_store_is_open(tmp_path, clock, monkeypatch):
    """Whoever uses the store, without anybody's asking for them, and without listing the folder."""
    monkeypatch.setattr(expiry, "SWEEP_SECONDS", 0.01)
    with TieredKVStore([DiskTier(tmp_path)], ttl_seconds=10) as store:
        for number in range(4):
            store.put(KEYS[number], make_kv(number))
        store.pin(KEYS[3])
        monkeypatch.setattr(disk_module, "SWEPT", 2)
        clock.advance(11)

        def ask():
            store.fetch([make_key(99)]).close()
            return store.tiers[0].usage().entries == 1

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", None)
            assert until(ask, 20)
        assert store.contains(KEYS[3])
    assert len(chunk_files(tmp_path)) == 1


# Folders


def stand_in(kind, path, elsewhere):
    """Put something in a folder's or a file's place."""
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "dangling link":
        path.symlink_to(elsewhere / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "file"])
def test_what_stands_for_a_folder_is_not_followed_and_named(tmp_path, kind, caplog):
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    theirs = elsewhere / "theirs.tmp"
    elsewhere.mkdir()
    theirs.touch()
    os.utime(theirs, (1, 1))
    folder = root / KEYS[0].chunk_id[:2]
    root.mkdir()
    stand_in(kind, folder, elsewhere)
    with TieredKVStore([DiskTier(root)]) as store:
        assert not store.put(KEYS[0], make_kv())
        assert store.get(KEYS[0]).reason == "store error"
        assert not store.contains(KEYS[0])
        assert not store.evict(KEYS[0])
        assert store.keys() == []
        assert store.put(KEYS[1], make_kv(1)), "in folders of its own"
        assert same(store.get(KEYS[1]).kv, make_kv(1))
    said = f"{folder} is a {kind.rpartition(' ')[2]} instead of the store's own folder: remove"
    assert said in caplog.text
    assert theirs.exists()
    assert [path for path in elsewhere.rglob("*") if path.is_file()] == [theirs]


# Sizes


@pytest.mark.parametrize("how", ["get", "fetch", "prefetch", "verify"])
def test_an_object_of_rubbish_is_read_no_further_than_its_head(tmp_path, how, monkeypatch):
    with TieredKVStore([HostTier(1 << 40), DiskTier(tmp_path)]) as store:
        store.put(KEYS[0], make_kv())
        store.tiers[0].evict(KEYS[0])
        (path,) = chunk_files(tmp_path)
        with path.open("wb") as file:
            file.truncate(3 << 30)
        asked, own = [], disk_module.read_range

        def read_range(file, start, nbytes):
            asked.append(nbytes)
            return own(file, start, nbytes)

        monkeypatch.setattr(disk_module, "read_range", read_range)
        if how == "get":
            assert store.get(KEYS[0]).reason == "damaged"
        elif how == "fetch":
            with store.fetch(KEYS[:1]) as source:
                assert source.take().reason == "damaged"
        elif how == "prefetch":
            store.prefetch(KEYS[:1])
            assert until(lambda: store.tiers[1].stats()["quarantined"] == 1)
        else:
            assert [one.reason for one in store.verify().damaged] == ["header is no JSON"]
        assert 0 < sum(asked) <= 1 << 19


class Endless(BaseHTTPRequestHandler):
    """Answers each range as one of a kibibyte, and sends mebibytes without end."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(206)
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 20:00:00 GMT")
        self.send_header("ETag", '"a"')
        self.send_header("Content-Range", "bytes 0-1023/1024")
        self.send_header("Content-Length", str(6 << 30))
        self.end_headers()
        try:
            for _ in range(6 << 10):
                self.wfile.write(bytes(1 << 20))
                self.server.sent += 1 << 20
        except OSError:
            pass

    def log_message(self, *_):
        pass


def test_an_answer_longer_than_it_says_is_given_up(s3, caplog):
    server = ThreadingHTTPServer((HOST, 0), Endless)
    server.sent, server.daemon_threads = 0, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with TieredKVStore([tier_at(f"s3://b?endpoint=http://{HOST}:{server.server_port}")]) as store:
        found = store.get(KEYS[0])
        assert (found.reason, found.tier) == ("store error", "s3")
    assert "sends more than the 1024 bytes of its answer" in caplog.text
    assert server.sent < 1 << 29
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB
    server.shutdown()
