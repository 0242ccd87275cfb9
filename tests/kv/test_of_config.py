"""Every setting of a store reaches it, whoever hands the settings on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import StoreConfig, TieredKVStore, TransformersEngine, open_engine
from cacheblend_rag.cli.options import store_settings
from cacheblend_rag.config import names_of
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

GIVEN = {
    "host_bytes": 1 << 20,
    "disk_bytes": 1 << 21,
    "ttl_seconds": 90.0,
    "read_only": True,
    "access_log": "none/log.jsonl",
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
        "access_log": store.access_log and str(store.access_log.path.relative_to(Path.cwd())),
    }


@pytest.mark.parametrize("way", ["whole", "engine", "server", "command line"])
def test_each_setting_reaches_the_store(way: str, tmp_path: Path) -> None:
    given = {"kv_path": str(tmp_path), **GIVEN}
    assert set(given) == names_of(StoreConfig)
    if way == "engine":
        engine = open_engine("transformers", model="demo", **given)
        assert isinstance(engine, TransformersEngine)
        assert held(engine.store) == given
        engine.close()
        return
    settings = {
        "whole": lambda: StoreConfig(**given),
        "server": lambda: ConnectorSettings.from_extra_config(given).store,
        "command line": lambda: store_settings(
            [f"{name}={value}" for name, value in given.items()]
        ),
    }[way]()
    with TieredKVStore.of(settings) as store:
        assert held(store) == given
