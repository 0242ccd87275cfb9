"""Opens a store without an engine: counts its chunks, reads them, and warms its fastest tier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.admin.select import Condition
from cacheblend_rag.engines.labels import Label, labels_in
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, Entry, KVKey, TieredKVStore
from cacheblend_rag.kv.access_log import AccessLog
from cacheblend_rag.prefill.conversation_kv import turn_fingerprint
from cacheblend_rag.settings import StoreConfig

USAGE_NAME = "usage"
"""The file with a store's usage, which every store has."""


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

    def count(self) -> dict[str, Any]:
        """Count chunks and bytes in all, by tier and by fingerprint; returns plain JSON values."""
        held = self.store.entries()
        counts: dict[str, dict[str, int]] = {}
        for key, entry in held.items():
            of = counts.setdefault(key.fingerprint, {"entries": 0, "bytes": 0})
            of["entries"] += 1
            of["bytes"] += entry.nbytes
        labels = labels_in(self.folder)
        disks = [tier for tier in self.store.tiers if isinstance(tier, DiskTier)]
        return {
            "path": str(self.folder),
            "entries": len(held),
            "bytes": sum(entry.nbytes for entry in held.values()),
            "quarantined": sum(len(tier.quarantined()) for tier in disks),
            "tiers": self.store.stats(),
            "fingerprints": counts,
            "models": {name: label.model for name, label in labels.items()},
            "of": kinds_of(counts, labels),
        }

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


def most_used(store: TieredKVStore, condition: Condition, log: Path | None) -> list[KVKey]:
    """Return the keys of chunks, the most used first.

    log: an access log whose entries are counted; without one, the most recently used come first.
    Raises StoreError when there is no such log, or it is no regular file.
    """
    if log is not None:
        AccessLog(log).check()
    entries = {key: entry for key, entry in store.entries().items() if condition(key, entry)}
    if log is None:
        return sorted(entries, key=lambda key: entries[key].used_at, reverse=True)
    if not log.is_file():
        raise StoreError(
            f"{log} is not an access log: an engine writes one with `--store access_log=FILE`"
        )
    return [key for key in AccessLog(log).most_used() if key in entries]


def warm(
    store: TieredKVStore,
    keys: Iterable[KVKey],
    most_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Copy chunks into the fastest tier, in this order, until it or ``most_bytes`` is full.

    progress: called with the number of chunks done and the total.

    Returns how many were copied (``warmed``), were ``there`` before, are ``missing`` (not stored,
    or not readable), or ``left`` without room, and the ``bytes`` of those that are in the tier.
    """
    todo = list(dict.fromkeys(keys))
    fastest = store.tiers[0]
    bounds = [bound for bound in (most_bytes, fastest.capacity_bytes) if bound is not None]
    room = min(bounds, default=None)
    done = dict.fromkeys(("warmed", "there", "missing", "left", "bytes"), 0)
    for number, key in enumerate(todo):
        if progress is not None:
            progress(number + 1, len(todo))
        size = store.nbytes(key)
        if size is not None and room is not None and done["bytes"] + size > room:
            done["left"] = len(todo) - number
            break
        if size is None:
            fate = "missing"
        elif fastest.contains(key):
            fate = "there"
        else:
            fate = "warmed" if store.promote(key) else "missing"
        done[fate] += 1
        done["bytes"] += 0 if fate == "missing" or size is None else size
    return done
