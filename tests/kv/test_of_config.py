"""Every setting of a store reaches it, whoever hands the settings on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import StoreConfig, TieredKVStore, TransformersEngine, open_engine
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.kv import HostTier, ObjectTier, RedisTier, StoredChunk, TierPolicy
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.settings import names_of
from cacheblend_rag.settings.tier_url import TierUrl
from tests.kv.samples import make_key, make_kv
from tests.toy import TOY

URLS = ("host://?capacity=1MiB", "redis://cache:6380/2?ttl=1h&prefix=a:", "s3://bucket/kv")
GIVEN = {
    "host_bytes": 1 << 20,
    "disk_bytes": 1 << 21,
    "ttl_seconds": 90.0,
    "read_only": True,
    "precision": "fp8",
}


def held(store: TieredKVStore) -> dict[str, Any]:
    """What a store heeds, by the names of its settings."""
    host, disk = store.tiers
    return {
        "kv_path": str(disk.path),  # type: ignore[attr-defined]
        "host_bytes": host.capacity_bytes,
        "disk_bytes": disk.capacity_bytes,
        "ttl_seconds": store.ttl_seconds,
        "read_only": disk.policy.read_only,
        "precision": store.precision,
    }


@pytest.mark.parametrize("way", ["engine", "server"])
def test_each_setting_reaches_the_store(way: str, tmp_path: Path) -> None:
    given = {"kv_path": str(tmp_path), **GIVEN}
    assert {*given, "tiers"} == names_of(StoreConfig)
    if way == "engine":
        engine = open_engine("transformers", model=TOY, **given)
        assert isinstance(engine, TransformersEngine)
        assert held(engine.store) == given
        engine.close()
    else:
        with TieredKVStore.of(ConnectorSettings.from_extra_config(given).store) as store:
            assert held(store) == given


@pytest.mark.parametrize("tiers", [URLS, ", ".join(URLS)], ids=["list", "text"])
def test_urls_reach_the_store(tiers: Any, tmp_path: Path) -> None:
    """No server is asked before it is needed."""
    given = {"kv_path": str(tmp_path), "tiers": tiers, "ttl_seconds": 90.0}
    store = TieredKVStore.of(ConnectorSettings.from_extra_config(given).store)
    host, redis, s3 = store.tiers
    assert [tier.name for tier in store.tiers] == ["host", "redis", "s3"]
    assert isinstance(host, HostTier)
    assert isinstance(redis, RedisTier)
    assert isinstance(s3, ObjectTier)
    assert (host.capacity_bytes, redis.policy.ttl_seconds, store.ttl_seconds) == (1 << 20, 3600, 90)
    connection = redis.client.connection_pool.connection_kwargs
    assert [connection[name] for name in ("host", "port", "db")] == ["cache", 6380, 2]
    assert (redis.prefix, s3.store.prefix, s3.store.config["bucket"]) == ("a:", "kv", "bucket")
    store.close()


@pytest.mark.parametrize("query", ["", "?"])
def test_each_option_reaches_its_tier(query: str, tmp_path: Path) -> None:
    policy = "ttl=5m&promote=no&timeout=2s"
    told = TierPolicy(None, 300.0, False, "frequency", 2.0)
    near = ["host://", "device://", f"disk://{tmp_path}"]
    for place in [*near, "redis://cache", "s3://b", "memory://"]:
        more = "&capacity=3MB&admit=always" if place in near else ""
        bound = {"capacity_bytes": 3_000_000, "admit": "always"} if more else {}
        tier = open_tier(TierUrl(f"{place}?{policy}{more}&name=mine"), "cpu")
        assert (tier.name, tier.policy) == ("mine", replace(told, **bound)), place
        tier.close()
    places = [*near, "redis://cache", "s3://b"]
    plain = {place: open_tier(TierUrl(place + query), "cpu").policy for place in places}
    assert plain["host://"] == TierPolicy(4 << 30)
    assert plain["device://"] == TierPolicy(1 << 30)
    assert plain[f"disk://{tmp_path}"] == TierPolicy()
    assert plain["redis://cache"] == plain["s3://b"] == TierPolicy()


def test_a_device_tier_is_where_the_engine_computes() -> None:
    store = TieredKVStore.of(StoreConfig(tiers=("device://", "host://")), device="meta")
    key, kv = make_key(0), make_kv()
    assert store.put(key, kv)
    found = store.get(key)
    assert found.tier == "device"
    assert found.kv is not None
    assert {found.kv.keys.device.type, found.kv.values.device.type} == {"meta"}
    below = store.tiers[1].get(key)
    assert isinstance(below, StoredChunk)
    assert torch.equal(below.kv.keys, kv.keys)
