"""Opens the tiers that a URL or a StoreConfig describes."""

from __future__ import annotations

from typing import Any

import torch

from cacheblend_rag.kv.tiers.base import Tier
from cacheblend_rag.kv.tiers.disk import DiskTier
from cacheblend_rag.kv.tiers.host import DeviceTier, HostTier
from cacheblend_rag.kv.tiers.object import ObjectTier
from cacheblend_rag.kv.tiers.object_client import open_store
from cacheblend_rag.kv.tiers.policy import TierPolicy
from cacheblend_rag.kv.tiers.redis import PREFIX, RedisTier
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.settings.tier_url import REDIS_SCHEMES, TierUrl

MEMORY_BYTES = {"device": 1 << 30, "host": 4 << 30}
"""Default capacities of memory tiers."""


def open_tiers(config: StoreConfig, device: torch.device | str) -> list[Tier]:
    """Return the tiers of a config, fastest first; raises as ``open_tier``."""
    if config.tiers is not None:
        return [open_tier(url, device, read_only=config.read_only) for url in config.urls]
    tiers: list[Tier] = [] if config.host_bytes == 0 else [HostTier(config.host_bytes)]
    if config.kv_path is not None:
        policy = TierPolicy(config.disk_bytes, read_only=config.read_only)
        tiers.append(DiskTier(config.kv_path, policy=policy))
    return tiers


def open_tier(url: TierUrl, device: torch.device | str, *, read_only: bool = False) -> Tier:
    """Return the tier that a URL describes; ``device`` is where the engine computes.

    read_only: whether it is only read; memory tiers of this process are used as usual.

    Raises MissingExtraError without its library, StoreError when it cannot be opened.
    """
    policy = _policy(url, read_only and url.outlives)
    if url.scheme == "device":
        return DeviceTier(device, name=url.name, policy=policy)
    if url.scheme == "host":
        return HostTier(name=url.name, policy=policy)
    if url.scheme == "disk":
        return DiskTier(url.path, name=url.name, policy=policy)
    if url.scheme in REDIS_SCHEMES:
        prefix = url.options.get("prefix", PREFIX)
        return RedisTier(**redis_place(url), prefix=prefix, name=url.name, policy=policy)
    store = object_store(url, policy.timeout_seconds)
    return ObjectTier(store, keeps_metadata=url.scheme != "file", name=url.name, policy=policy)


def _policy(url: TierUrl, read_only: bool) -> TierPolicy:
    told = url.options
    return TierPolicy(
        capacity_bytes=told.get("capacity", MEMORY_BYTES.get(url.scheme)),
        ttl_seconds=told.get("ttl"),
        promote=told.get("promote", True),
        admit=told.get("admit", "frequency"),
        timeout_seconds=told.get("timeout"),
        read_only=read_only,
    )


def redis_place(url: TierUrl) -> dict[str, Any]:
    """Return where a tier's Redis is, and its credentials, as ``connect`` takes them."""
    is_socket = url.scheme == "unix"
    database = url.options.get("db") or ("" if is_socket else url.path.strip("/"))
    return {
        "host": url.host,
        "port": url.port or 6379,
        "db": int(database or 0),
        "path": url.path if is_socket else None,
        "tls": url.scheme == "rediss",
        "ca_certs": url.options.get("ssl_ca_certs"),
        "user": url.user,
        "password": url.password,
    }


def object_store(url: TierUrl, timeout_seconds: float | None = None) -> Any:
    """Return the object store that a URL names, as ``open_store`` does; raises as it."""
    told = {name: url.options[name] for name in ("endpoint", "region") if name in url.options}
    bare = f"{url.scheme}://{url.host}{url.path}"
    return open_store(bare, timeout_seconds=timeout_seconds, **told)
