"""What goes wrong with networks and servers is a miss that names the tier, and passes by itself."""

import time
import uuid
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import TieredKVStore
from cacheblend_rag.kv.tiers import breaker
from cacheblend_rag.kv.tiers.redis import connect
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings.tier_url import TierUrl
from tests.kv.samples import make_key, make_kv, same, taken, until
from tests.local_servers import HOST, redis_server
from tests.servers import redis_place, refusing, tier_at

KEY, OTHER, THIRD = (make_key(number) for number in range(3))


@pytest.fixture(autouse=True)
def _tried_soon(monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(breaker, "MOST_SECONDS", 0.2)


@pytest.fixture
def own_redis():
    with redis_server() as server:
        yield server


def opened(*urls):
    return TieredKVStore([tier_at(url) for url in urls])


def test_a_container_that_is_not_there(monkeypatch, caplog):
    """Azure's word for a bucket; its metadata has names that are identifiers, or is refused."""
    asked = []
    with refusing(404, "<Error><Code>ContainerNotFound</Code></Error>", asked) as address:
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", address)
        store = opened("az://nowhere/chunks")
        assert not store.put(KEY, make_kv())
        (header,) = (name for one in asked for name in one if name.startswith("x-ms-meta-"))
        assert header.removeprefix("x-ms-meta-").isidentifier()
        found = store.get(KEY)
        assert (found.kv, found.reason, found.tier) == (None, "store error", "az")
        with pytest.raises(StoreError, match="the az tier cannot be listed: "):
            store.entries()
        assert "there is no such bucket" in caplog.text
        store.close()


def test_redis_is_reached_by_its_socket(redis_socket):
    store = opened(f"unix://{redis_socket}?db=1&prefix={uuid.uuid4().hex}:")
    assert store.put(KEY, make_kv())
    assert same(store.get(KEY).kv, make_kv())
    store.close()


class AnswersTwice(StreamRequestHandler):
    """A Redis whose GET returns the name it is given, and leaves another answer behind."""

    def handle(self):
        while count := self.rfile.readline():
            words = []
            for _ in range(int(count[1:])):
                length = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(length + 2)[:length])
            if words[0] == b"GET":
                self.wfile.write(b"$%d\r\n%s\r\n$5\r\nstray\r\n" % (len(words[1]), words[1]))
            else:
                self.wfile.write(b"%1\r\n+proto\r\n:3\r\n" if words[0] == b"HELLO" else b"+OK\r\n")


def test_what_is_left_in_a_connection_answers_no_later_command():
    with ThreadingTCPServer((HOST, 0), AnswersTwice) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        client = connect(host=HOST, port=server.server_address[1])
        try:
            assert [client.get(name) for name in ("one", "two")] == [b"one", b"two"]
        finally:
            client.close()
            server.shutdown()


def test_a_redis_that_the_system_does_not_vouch_for_is_not_trusted(redis_tls, tmp_path):
    address = f"{redis_tls['host']}:{redis_tls['port']}"
    trusting = opened(f"rediss://{address}/0?ssl_ca_certs={redis_tls['ca_certs']}")
    assert trusting.put(KEY, make_kv())
    assert same(trusting.get(KEY).kv, make_kv())
    strict = opened(f"rediss://{address}/0")
    assert (strict.get(KEY).reason, strict.get(KEY).tier) == ("store error", "redis")
    assert not strict.put(OTHER, make_kv(1))
    with pytest.raises(StoreError, match=r"nothing\.pem: there is no such file"):
        opened(f"rediss://{address}/0?ssl_ca_certs={tmp_path}/nothing.pem")
    assert trusting.evict(KEY)
    for store in (trusting, strict):
        store.close()


# Deletions


def test_what_is_to_be_deleted_is_not_read_meanwhile_and_may_be_stored_again(own_redis, tmp_path):
    url = redis_place(own_redis, "timeout=0.3s")
    store = opened(url)
    assert store.put(KEY, make_kv())
    own_redis.pause()
    first = TieredKVStore([tier_at(url)], folder=tmp_path)
    assert first.evict(KEY).pending == ("redis",)
    first.close()
    own_redis.resume()
    tier = open_tier(TierUrl(url), "cpu", read_only=True)  # which deletes nothing itself
    reader = TieredKVStore([tier], folder=tmp_path)
    assert until(lambda: tier.contains(KEY), 15)
    assert not reader.contains(KEY)
    assert reader.get(KEY).reason == "not stored"
    with reader.fetch([KEY]) as source:
        assert taken(source)[0].kv is None
    assert store.put(KEY, make_kv())
    assert same(reader.get(KEY).kv, make_kv())
    reader.close()
    again = TieredKVStore([tier_at(url)], folder=tmp_path)
    assert until(lambda: not again.deletions, 15)
    assert again.contains(KEY), "it was stored after it was deleted"
    again.close()
    store.close()


def test_without_a_folder_a_deletion_that_waits_says_how_long_it_is_known(own_redis):
    store = opened(redis_place(own_redis, "timeout=0.3s"))
    assert store.put(KEY, make_kv())
    own_redis.pause()
    evicted = store.evict(KEY)
    assert (evicted.pending, evicted.is_noted) == (("redis",), False)
    assert "unless this process ends before" in evicted.waiting
    own_redis.resume()
    assert until(lambda: not store.deletions, 15)
    assert store.get(KEY).reason == "not stored"
    store.close()


def test_a_folder_of_deletions_that_others_wrote_in_is_read_as_far_as_it_is_one(redis, tmp_path):
    url, past, folder = redis_place(redis), time.time() - 60, tmp_path / "deletions"
    folder.mkdir()
    for name in (
        "x",
        f"nan {KEY} redis",
        f"{past} {KEY}x redis",
        f"{past} {OTHER} redis",
        "\udcff",
    ):
        (folder / name).touch()
    with TieredKVStore([tier_at(url)], folder=tmp_path) as store:
        assert store.put(KEY, make_kv())
        assert store.put(OTHER, make_kv())
        assert store.contains_many([KEY, OTHER]) == [True, True]
        assert until(lambda: not store.deletions, 15)
        assert store.contains_many([KEY, OTHER]) == [True, True]
