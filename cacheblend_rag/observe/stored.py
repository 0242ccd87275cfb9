"""Stored: a folder of chunk KV, seen from outside of any engine: opened, counted, chosen from."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, Entry, KVKey, TieredKVStore, chunk_id

Condition = Callable[[KVKey, Entry], bool]

USAGE_NAME = "usage"
"""The file in which every store counts what it holds."""


@dataclass(frozen=True)
class Holding:
    """So many chunks of so many bytes."""

    entries: int = 0
    nbytes: int = 0

    def with_entry(self, entry: Entry) -> Holding:
        """Return one chunk more."""
        return Holding(self.entries + 1, self.nbytes + entry.nbytes)


@dataclass(frozen=True)
class StoreCount:
    """What a store holds: in all and by fingerprint, of older versions, and in quarantine."""

    total: Holding
    fingerprints: Mapping[str, Holding]
    old: int
    quarantined: int


def check_is_store(path: Path) -> None:
    """Raise StoreError unless a folder is one that chunk KV was kept in."""
    if not path.is_dir():
        raise StoreError(f"{path} is no folder: give --path or set CACHEBLEND_STORE")
    if not (path / USAGE_NAME).exists() and not any(path.glob("?/?/*.safetensors")):
        raise StoreError(f"{path} is no store of chunk KV: give --path or set CACHEBLEND_STORE")


@dataclass(frozen=True)
class StoreFolder:
    """A store that is open, and the one tier it has."""

    store: TieredKVStore
    disk: DiskTier

    def count(self) -> StoreCount:
        """Count what the store holds."""
        held = self.store.entries()
        total, by_fingerprint = Holding(), defaultdict[str, Holding](Holding)
        for key, entry in held.items():
            total = total.with_entry(entry)
            by_fingerprint[key.fingerprint] = by_fingerprint[key.fingerprint].with_entry(entry)
        old = sum(key.is_old for key in held)
        return StoreCount(total, dict(by_fingerprint), old, len(self.disk.quarantined()))

    def by_use(self) -> list[tuple[KVKey, Entry]]:
        """Return all chunks, least recently used first."""
        return sorted(self.store.entries().items(), key=lambda item: item[1].used_at)


@contextmanager
def opened(path: Path) -> Iterator[StoreFolder]:
    """Open a store that is there already; raises StoreError when it cannot be used."""
    check_is_store(path)
    try:
        disk = DiskTier(path)
        with TieredKVStore([disk]) as store:
            yield StoreFolder(store, disk)
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error


def examine_store(path: Path) -> dict[str, Any]:
    """Read every object of a store; damaged ones are counted and left in place.

    Returns plain JSON values. Raises StoreError when the folder is no store or cannot be used.
    """
    check_is_store(path)
    with TieredKVStore.open(host_bytes=0, disk_path=path) as store:
        report = store.verify()
        stored = sum(tier.stats()["bytes"] or 0 for tier in store.tiers)
    return {
        "path": str(path),
        "problem": None,
        "entries": report.checked,
        "bytes": stored,
        "damaged": [{"key": str(d.key), "reason": d.reason} for d in report.damaged],
    }


def named(keys: Iterable[str]) -> Condition:
    """Return the test for chunks of these keys; raises StoreError when one is no key."""
    wanted = {_canonical(text) for text in keys}
    return lambda key, entry: str(key) in wanted


def matching(fingerprint: str | None = None, older_than: float | None = None) -> Condition:
    """Return the test for chunks that match every given condition; all do where none is given.

    older_than: seconds since they were written. Raises StoreError when a fingerprint is none.
    """
    if fingerprint is not None:
        _check_fingerprint(fingerprint)
    oldest = None if older_than is None else time.time() - older_than

    def matches(key: KVKey, entry: Entry) -> bool:
        of_fingerprint = fingerprint is None or key.fingerprint == fingerprint
        return of_fingerprint and (oldest is None or entry.written_at < oldest)

    return matches


def _check_fingerprint(text: str) -> None:
    try:
        KVKey(chunk_id([]), text)
    except ValueError as error:
        raise StoreError(f"{text!r} is no fingerprint: `store stats` prints them") from error


def _canonical(text: str) -> str:
    try:
        return str(KVKey.parse(text))
    except ValueError as error:
        raise StoreError(f"{text!r} is no KV key: `store ls` prints them") from error
