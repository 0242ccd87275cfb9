"""Opens a store without an engine and counts its chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.admin.select import Condition
from cacheblend_rag.engines.labels import Label, labels_in
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, Entry, KVKey, TieredKVStore
from cacheblend_rag.prefill.conversation_kv import turn_fingerprint
from cacheblend_rag.settings import StoreConfig

USAGE_NAME = "usage"
"""The file with a store's usage, which every store has."""


@dataclass(frozen=True)
class Holding:
    """A number of chunks and their bytes."""

    entries: int = 0
    nbytes: int = 0

    def with_entry(self, entry: Entry) -> Holding:
        """Return the count with one more chunk."""
        return Holding(self.entries + 1, self.nbytes + entry.nbytes)


@dataclass(frozen=True)
class StoreCount:
    """The chunks of a store: in total, by fingerprint, and in quarantine.

    labels: the models of fingerprints, as far as recorded. kinds: see ``kinds_of``. tiers: each
    tier's own numbers.
    """

    total: Holding
    fingerprints: Mapping[str, Holding]
    quarantined: int
    labels: Mapping[str, Label]
    kinds: Mapping[str, str]
    tiers: Mapping[str, Mapping[str, int | None]]


def check_is_store(path: Path) -> None:
    """Raise StoreError unless a folder is a store of chunk KV."""
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder: give --kv-path or set CACHEBLEND_KV_PATH")
    if not (path / USAGE_NAME).exists() and not any(path.glob("?/?/*.safetensors")):
        raise StoreError(
            f"{path} is not a store of chunk KV: give --kv-path or set CACHEBLEND_KV_PATH"
        )


@dataclass(frozen=True)
class OpenStore:
    """An open store, and the folder with its registry of chunks and its record of models."""

    store: TieredKVStore
    folder: Path

    def count(self) -> StoreCount:
        """Count the store's chunks."""
        held = self.store.entries()
        total, by_fingerprint = Holding(), defaultdict[str, Holding](Holding)
        labels = labels_in(self.folder)
        for key, entry in held.items():
            total = total.with_entry(entry)
            by_fingerprint[key.fingerprint] = by_fingerprint[key.fingerprint].with_entry(entry)
        return StoreCount(
            total,
            dict(by_fingerprint),
            quarantined=sum(
                len(t.quarantined()) for t in self.store.tiers if isinstance(t, DiskTier)
            ),
            labels=labels,
            kinds=kinds_of(by_fingerprint, labels),
            tiers=self.store.stats(),
        )

    def kinds(self) -> dict[str, str]:
        """Return what the store's fingerprints are of, see ``kinds_of``."""
        return kinds_of({key.fingerprint for key in self.store.entries()}, labels_in(self.folder))

    def by_use(self, condition: Condition | None = None) -> list[tuple[KVKey, Entry]]:
        """Return the chunks for which a condition holds, least recently used first."""
        held = self.store.entries().items()
        chosen = [one for one in held if condition is None or condition(*one)]
        return sorted(chosen, key=lambda item: item[1].used_at)


def kinds_of(fingerprints: Collection[str], labels: Mapping[str, Label]) -> dict[str, str]:
    """Return what fingerprints are of, as far as it can be told: a model's chunks, or turns.

    Conversations' turns are told by the fingerprint of their chunks; prefix blocks, and chunks that
    vLLM has stored, are left out.

    Args:
        fingerprints: of stored KV.
        labels: the models that are recorded.
    """
    named = {one: label.model for one, label in labels.items()}
    of_turns = {turn_fingerprint(one): one for one in {*fingerprints, *named}}
    turns = {
        turn: f"turns, {named[chunks]}" if chunks in named else "turns"
        for turn, chunks in of_turns.items()
        if turn in fingerprints
    }
    return {**named, **turns}


@contextmanager
def opened(path: Path, settings: StoreConfig | None = None) -> Iterator[OpenStore]:
    """Open a store without tiers in memory; raises StoreError if that fails.

    path: its folder or, with tiers in the settings, the folder of its registry.
    """
    config = (settings or StoreConfig()).with_changes(access_log=None)
    if config.tiers is not None:
        config = config.with_changes(tiers=tuple(url for url in config.urls if url.outlives))
    else:
        check_is_store(path)
        config = config.with_changes(kv_path=str(path), host_bytes=0)
    try:
        with TieredKVStore.of(config) as store:
            yield OpenStore(store, path)
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error


def examine_store(path: Path) -> dict[str, Any]:
    """Read every object of a store; damaged ones are counted and left in place.

    Returns plain JSON values. Raises StoreError when the folder is no store or cannot be used.
    """
    check_is_store(path)
    with TieredKVStore.open(host_bytes=0, kv_path=path) as store:
        report = store.verify()
        stored = sum(tier.stats()["bytes"] or 0 for tier in store.tiers)
    return {
        "path": str(path),
        "problem": None,
        "entries": report.checked,
        "bytes": stored,
        "damaged": [{"key": str(d.key), "reason": d.reason} for d in report.damaged],
    }
