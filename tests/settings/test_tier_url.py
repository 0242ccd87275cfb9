"""A tier's URL: what it says, what is wrong with it, and that no password is ever shown."""

import copy
import json
import pickle
import traceback

import pytest

from cacheblend_rag import EngineConfig, StoreConfig
from cacheblend_rag.cli.named_settings import named
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.tier_url import TierUrl, read_tiers
from tests.toy import TOY

SECRET = "qun/ter#2"
WITH_PASSWORD = "redis://reader:qun%2Fter%232@cache:6380/2?ttl=1h&prefix=a:"


def test_a_url_says_where_and_how():
    url = TierUrl("rediss://reader@cache:6380/2?ttl=90m&promote=no")
    assert (url.scheme, url.host, url.port, url.user, url.path) == (
        "rediss", "cache", 6380, "reader", "/2",
    )  # fmt: skip
    assert url.options == {"ttl": 5400, "promote": False}
    assert TierUrl("disk:///a%20b/c?admit=always").path == "/a b/c"
    assert TierUrl("host://?capacity=none").options == {"capacity": None}


def test_tiers_are_named_by_kind_or_as_they_are_told():
    urls = ["host://", "redis://a", "s3://x/y", "s3://x/z?name=far"]
    assert [url.name for url in read_tiers(urls)] == ["host", "redis", "s3", "far"]
    assert [str(url) for url in read_tiers("host://, disk:///a")] == ["host://", "disk:///a"]
    for twice in (["redis://a", "rediss://b"], ["host://?name=a", "s3://x?name=a"]):
        with pytest.raises(ConfigError, match=r"2 are named \w+: give each a \?name= of its own"):
            read_tiers(twice)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cache:6379", "tiers: a text that is no URL must begin with one of device://, host://"),
        ("s3://", "tiers: s3://...: has no location: give it as s3://bucket/prefix"),
        ("disk://kv/x", "tiers: disk://...: has no host: give it as disk:///folder"),
        ("redis://a/x", "tiers: redis://...: its path is the number of a database, as in /0"),
        ("redis://a:b", "tiers: redis://...: host or port cannot be read"),
        ("host://?capacity=much", "tiers: host://...: capacity='much' must be a size, such as"),
        ("redis://a?ttl=0", "tiers: redis://...: ttl=.0. must be greater than 0"),
        ("redis://a?capacity=1GiB", "redis://...: unknown option .capacity.; known: name, prefix"),
        ("host://?promote=5", "tiers: host://...: promote='5' must be a valid boolean"),
        ("host://?name=a%20b", "tiers: host://...: name='a b': String should match"),
        ("host://?ttl=1h&ttl=2h", "tiers: host://...: ttl is given twice: give it once"),
        ("s3://key:secret@b/p", "takes no user: its credentials come from the environment"),
        ("redis://:a#b@h", "host or port cannot be read|holds an unexpected # or @"),
        (["host://", 3], "tiers must be a list of URLs"),
        ([], "tiers=.. names no tier: give one, such as host://"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, said):
    with pytest.raises(ConfigError, match=said.replace("?", "[?]")) as caught:
        StoreConfig(tiers=text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://:pa/ss@h/0", "redis://:pa#ss@h", "redis://:pa?ss@h", "redis://u:pass@h:ss/0",
            "redis://u:pass@h/pass", "s3://pass:pass@b/p", "redis://h?pass=pass"],
)  # fmt: skip
def test_no_error_tells_a_password(url):
    with pytest.raises(ConfigError) as caught:
        StoreConfig(tiers=[url])
    told = "".join(traceback.format_exception(caught.value)).split("ConfigError: ")[-1]
    assert not {"pa/", "ss@", "pass:", "pass@"} & {
        told[i : i + n] for n in (3, 5) for i in range(len(told))
    }
    assert caught.value.__cause__ is None


def test_kv_path_is_the_registrys_place_and_memory_is_told_once(tmp_path):
    assert StoreConfig(kv_path=tmp_path, tiers=["host://"]).kv_path == str(tmp_path)
    for given, url in (({"host_bytes": 5}, "host://"), ({"disk_bytes": 5}, "disk:///folder")):
        with pytest.raises(ConfigError, match=f"beside tiers: give {url}.capacity=... as one of"):
            StoreConfig(tiers=["host://"], **given)


def test_a_password_is_shown_nowhere_and_handed_on_by_the_environment():
    store = StoreConfig(tiers=["host://", WITH_PASSWORD])
    engine = EngineConfig(model=TOY, store=store)
    settings = ConnectorSettings(store=store)
    command = StoreConfig.of(named([f"tiers={WITH_PASSWORD}", "tiers=host://"], StoreConfig))
    assert [url.scheme for url in command.urls] == ["redis", "host"]
    shown = [
        repr(store), str(store.tiers), f"{store.urls[1]}", repr(store.urls[1].__dict__),
        json.dumps(store.to_dict()), json.dumps(engine.to_dict()), repr(engine), repr(settings),
        json.dumps(settings.to_transfer_config()), repr(command), repr(copy.deepcopy(store)),
    ]  # fmt: skip
    for text in shown:
        assert "qun" not in text
        assert "ter" not in text.replace("tiers", "").replace("filter", "").replace("register", "")
    for kept in (store, store.with_changes(kv_path="x"), settings.store, engine.store, command):
        assert kept.environment() == {"CACHEBLEND_REDIS_PASSWORD": SECRET}
    with pytest.raises(TypeError, match="give it as CACHEBLEND_REDIS_PASSWORD"):
        pickle.dumps(store)


def test_a_worker_process_finds_the_password_in_its_environment(monkeypatch):
    sent = ConnectorSettings(store=StoreConfig(tiers=[WITH_PASSWORD, "redis://b?name=other"]))
    extra = sent.to_extra_config()
    assert {type(url) for url in extra["tiers"]} == {str}, "a TierUrl has its password with it"
    plain = json.loads(json.dumps(extra))
    assert ConnectorSettings.from_extra_config(plain).store.urls[0].password is None
    for name, value in sent.store.environment().items():
        monkeypatch.setenv(name, value)
    got = ConnectorSettings.from_extra_config(plain).store
    assert got.urls[0].password.get_secret_value() == SECRET
    assert got.urls[1].password is None
    again = pickle.loads(pickle.dumps(got))  # noqa: S301 - our own
    assert again == got
    assert [url.name for url in again.urls] == ["redis", "other"]
