"""Opens a store without an engine: chooses, counts, checks, pins and copies its chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cacheblend_rag.engines.identity import Label, labels_in
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, Entry, KVKey, TieredKVStore
from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.kv.mac import mac_of
from cacheblend_rag.kv.tiers.disk import INDEX
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.models import public_name
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.settings import LeadInConfig, StoreConfig
from cacheblend_rag.settings.base import Seconds, Settings
from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry

Condition = Callable[[KVKey, Entry], bool]

ChunkNames = frozenset[tuple[str, str]]
"""Chunk and context ids: the parts of keys that are equal for all models and shards."""


class Choice(Settings):
    """The chunks that match every given condition; without conditions all chunks."""

    _noun: ClassVar[str] = "condition"

    key: str | None = None
    """Only the chunk with this key."""
    fingerprint: str | None = None
    """Only chunks with this fingerprint: of one model and its settings."""
    namespace: str | None = None
    """Only chunks of this namespace."""
    model: str | None = None
    """Only chunks of this model, by its name or folder."""
    document: str | None = None
    """Only chunks of the document with this id; needs ``model``, whose tokenizer names chunks."""
    older_than: Seconds | None = None
    """Only chunks that were written longer ago, in seconds."""
    newer_than: Seconds | None = None
    """Only chunks that were written within this time, in seconds."""

    def condition(self, folder: Path | None, *, spare: bool = False) -> Condition:
        """Return the predicate for the chunks.

        Args:
            folder: the one with the registry of chunks and the record of models.
            spare: leave out chunks of a document that other documents share.

        Raises:
            StoreError: if the folder lacks a record.
        """
        tests = [*self._by_entry(), *self._by_name(), *self._by_folder(folder, spare)]
        return lambda key, entry: all(test(key, entry) for test in tests)

    def _by_entry(self) -> Iterator[Condition]:
        now = time.time()
        if (oldest := self.older_than) is not None:
            yield lambda _, entry: entry.written_at < now - oldest
        if (newest := self.newer_than) is not None:
            yield lambda _, entry: entry.written_at >= now - newest

    def _by_name(self) -> Iterator[Condition]:
        if self.key is not None:
            yield lambda key, _: str(key) == self.key
        if self.fingerprint is not None:
            yield lambda key, _: key.fingerprint == self.fingerprint
        if self.namespace is not None:
            digits = namespace_id(self.namespace)
            yield lambda key, _: key.fingerprint.startswith(digits)

    def _by_folder(self, folder: Path | None, spare: bool) -> Iterator[Condition]:
        if self.model is None and self.document is None:
            return
        if folder is None:
            raise StoreError("a folder lists documents and models: give the store's folder, too")
        labels = labels_in(folder)
        if self.model is not None:
            aliases = {self.model, public_name(self.model)}
            named = {fingerprint for fingerprint, label in labels.items() if label.model in aliases}
            if self.document is None and not named:
                raise StoreError(
                    f"no chunk in {folder} is recorded for model {self.model!r}: `store stats` "
                    "prints models and fingerprints"
                )
            if named:
                yield lambda key, _: key.fingerprint in named
        if self.document is not None:
            names = self._names_of_document(folder, self.document, labels, spare)
            every = ChunkNames().union(*names.values())

            def is_of_document(key: KVKey, _: Entry) -> bool:
                label = labels.get(key.fingerprint)
                return (key.chunk_id, key.context_id) in (names[label.lead_in] if label else every)

            yield is_of_document

    def _names_of_document(
        self, folder: Path, document: str, labels: dict[str, Label], spare: bool
    ) -> dict[LeadInConfig, ChunkNames]:
        """Return the ids of a document's chunks, for each lead-in recorded in the store."""
        if self.model is None:
            raise StoreError("--only document needs the model's tokenizer: give --only model, too")
        tokenizer = load_tokenizer(self.model)
        namespace = "*" if self.namespace is None else namespace_id(self.namespace)
        files = sorted(folder.glob(f"chunks-{namespace}.sqlite"))
        registries = [SharedChunkRegistry(file, read_only=True) for file in files]
        if not any(registry.document(document) for registry in registries):
            raise StoreError(f"{folder} knows no document {document!r}")
        found = {}
        for config in {label.lead_in for label in labels.values()} | {LeadInConfig()}:
            encoder = PromptEncoder(tokenizer)
            lead_in = LeadIn(encoder, config, instruction="", identity={}, namespace="")
            names = (_named(registry, lead_in, document, spare) for registry in registries)
            found[config] = ChunkNames().union(*names)
        for registry in registries:
            registry.close()
        return found


def _named(
    registry: SharedChunkRegistry, lead_in: LeadIn, document: str, spare: bool
) -> set[tuple[str, str]]:
    def name(chunk: Chunk) -> tuple[str, str]:
        key = lead_in.key(chunk)
        return key.chunk_id, key.context_id

    chunks = set(registry.document(document))
    names = set(map(name, chunks))
    if spare:  # chunks of other documents with the same texts
        variants = (one for chunk in chunks for one in registry.variants(chunk.text))
        names -= {name(one) for one in variants if one not in chunks}
    return names


@dataclass(frozen=True)
class OpenStore:
    """An open store. place: its folder or first tier. folder: of its registry and its models."""

    store: TieredKVStore
    place: str
    folder: Path | None

    def count(self) -> dict[str, Any]:
        """Count chunks and bytes in all, by tier and by fingerprint; returns plain JSON values."""
        held = self.store.entries()
        counts: dict[str, dict[str, int]] = {}
        for key, entry in held.items():
            of = counts.setdefault(key.fingerprint, {"entries": 0, "bytes": 0})
            of["entries"] += 1
            of["bytes"] += entry.nbytes
        labels = {} if self.folder is None else labels_in(self.folder)
        disks = [tier for tier in self.store.tiers if isinstance(tier, DiskTier)]
        return {
            "path": self.place,
            "entries": len(held),
            "bytes": sum(entry.nbytes for entry in held.values()),
            "quarantined": sum(len(tier.quarantined()) for tier in disks),
            "tiers": self.store.stats(),
            "fingerprints": counts,
            "models": {name: label.model for name, label in labels.items()},
        }

    def by_use(self, choice: Choice, *, spare: bool = False) -> list[tuple[KVKey, Entry]]:
        """Return the stored chunks that match ``choice``, least recently used first."""
        condition = choice.condition(self.folder, spare=spare)
        chosen = [one for one in self.store.entries().items() if condition(*one)]
        return sorted(chosen, key=lambda item: item[1].used_at)

    def pin(self, choice: Choice) -> int:
        """Pin the stored chunks that match ``choice``; returns how many.

        Pinned chunks no process evicts for capacity or age. Raises StoreError when no tier keeps
        pins.
        """
        self._check_keeps_pins()
        keys = [key for key, _ in self.by_use(choice)]
        self.store.pin(*keys)
        return len(keys)

    def unpin(self, choice: Choice) -> int:
        """Unpin the chosen chunks, or without a condition all, stored or not.

        Returns how many were pinned. Raises StoreError when no tier keeps pins.
        """
        self._check_keeps_pins()
        keys = self.store.pinned()
        if choice.given():
            keys &= {key for key, _ in self.by_use(choice)}
        self.store.unpin(*keys)
        return len(keys)

    def without_pins(self) -> list[str]:
        """Return the names of the tiers that keep no pins: pinned chunks may be evicted there."""
        return [tier.name for tier in self.store.tiers if not tier.keeps_pins]

    def _check_keeps_pins(self) -> None:
        if len(without := self.without_pins()) == len(self.store.tiers):
            raise StoreError(
                f"no pins are kept in {', '.join(without)}: only a folder (disk) keeps pins"
            )


def check_is_store(path: Path) -> Path:
    """Return a folder of chunk KV; raises StoreError for anything else."""
    what = "a store of chunk KV" if path.is_dir() else "a folder"
    if not (path / INDEX).exists() and not any(path.glob("??/*.safetensors")):
        raise StoreError(
            f"{path} is not {what}: give the store's folder, or set CACHEBLEND_KV_PATH"
        )
    return path


@contextmanager
def opened(places: Sequence[str], *, read_only: bool = False) -> Iterator[OpenStore]:
    """Open a store: a folder of chunk KV, or tiers by their URLs; raises StoreError.

    Tiers in memory are left out. Of a folder beside URLs only its records are used.
    """
    folders = [place for place in places if "://" not in place]
    if len(folders) > 1:
        raise StoreError(f"{folders[1]} is a second folder: give the tiers of a store by their URL")
    tiers = [place for place in places if "://" in place] or folders
    urls = [url for url in map(_tier_url, tiers) if url.outlives]
    disks = [check_is_store(Path(url.path)) for url in urls if url.scheme == "disk"]
    kv_path = next(iter(folders), None)
    config = StoreConfig(kv_path=kv_path, tiers=tuple(urls), read_only=read_only)
    try:
        with TieredKVStore.of(config) as store:
            folder = next(iter([*map(Path, folders), *disks]), None)
            yield OpenStore(store, kv_path or urls[0], folder)
    except OSError as error:
        raise StoreError(f"{kv_path or urls[0]}: {error}") from error


def copy(
    source: str,
    target: str,
    choice: Choice,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Copy chunks from one tier into another, the most recently used first, until it is full.

    source, target: a folder, or a tier's URL. progress: called with the number of chunks done and
    the total.

    Returns how many were ``copied``, and their ``bytes``, were ``there`` before, have ``failed``
    (could not be read, or stored), and are ``left`` without room.
    """
    one, other = _tier_url(source), _tier_url(target)
    for url in (one, other):
        if not url.outlives:
            raise StoreError(f"{url}: what is in memory ends with this command: give another tier")
    if one.name == other.name:
        one = _tier_url(f"{source}{'&' if '?' in source else '?'}name=from")
    folder = check_is_store(Path(one.path)) if one.scheme == "disk" else None
    tiers = [open_tier(other, "cpu"), open_tier(one, "cpu", read_only=True)]
    with TieredKVStore(tiers, mac=mac_of()) as store:
        fast, slow = store.tiers
        condition = choice.condition(folder)
        held = {key: entry for key, entry in slow.entries() if condition(key, entry)}
        todo = [key for key in held if not fast.contains(key)]
        todo.sort(key=lambda key: held[key].used_at, reverse=True)
        done = {"copied": 0, "there": len(held) - len(todo), "failed": 0, "left": 0, "bytes": 0}
        room = math.inf if fast.capacity_bytes is None else fast.capacity_bytes
        room -= fast.usage().nbytes
        for number, key in enumerate(todo, start=1):
            progress(number, len(todo))
            if done["bytes"] + held[key].nbytes > room:
                done["left"] = len(todo) - number + 1
                break
            store.get(key)
            if fast.contains(key):
                done["copied"] += 1
                done["bytes"] += held[key].nbytes
            else:
                done["failed"] += 1
    return done


def _tier_url(place: str) -> TierUrl:
    """Return a tier's URL; a folder is a disk."""
    if "://" not in place:
        path, mark, query = place.partition("?")
        place = Path(path).absolute().as_uri().replace("file://", "disk://", 1) + mark + query
    return TierUrl(place)
