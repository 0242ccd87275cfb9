"""Opens a store without an engine: selects and pins chunks, counts, reads and warms them.

Pinned chunks no process evicts for capacity or age.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.labels import Label, labels_in
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, Entry, KVKey, TieredKVStore, chunk_id
from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.kv.tiers.disk import INDEX
from cacheblend_rag.models import public_name
from cacheblend_rag.prefill.conversation_kv import turn_fingerprint
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.settings import LeadInConfig, StoreConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder, Tokenizer
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry

Condition = Callable[[KVKey, Entry], bool]

ChunkNames = frozenset[tuple[str, str]]
"""Chunk and context ids: the parts of keys that are equal for all models and shards."""


@dataclass(frozen=True)
class Choice:
    """The chunks that match every given condition; without conditions all chunks.

    older_than, newer_than: seconds since they were written. model: a name or a folder, whose
    tokenizer is used if a document is named. spare: leave out chunks that other documents share.
    """

    fingerprint: str | None = None
    older_than: float | None = None
    newer_than: float | None = None
    namespace: str | None = None
    model: str | None = None
    document: str | None = None
    spare: bool = False

    @property
    def is_open(self) -> bool:
        """Whether no condition is given."""
        return self == Choice(spare=self.spare)

    def condition(self, store: Path | None) -> Condition:
        """Return the predicate for the chunks.

        store: the folder with the registry of chunks and the record of models.
        Raises StoreError for an invalid fingerprint, or if the folder lacks a record.
        """
        tests = [*self._by_entry(), *self._by_name(), *self._by_folder(store)]
        return lambda key, entry: all(test(key, entry) for test in tests)

    def _by_entry(self) -> Iterator[Condition]:
        now = time.time()
        if (oldest := self.older_than) is not None:
            yield lambda _, entry: entry.written_at < now - oldest
        if (newest := self.newer_than) is not None:
            yield lambda _, entry: entry.written_at >= now - newest

    def _by_name(self) -> Iterator[Condition]:
        if (fingerprint := self.fingerprint) is not None:
            _check_fingerprint(fingerprint)
            yield lambda key, _: key.fingerprint == fingerprint
        if self.namespace is not None:
            digits = namespace_id(self.namespace)
            yield lambda key, _: key.fingerprint.startswith(digits)

    def _by_folder(self, store: Path | None) -> Iterator[Condition]:
        if self.model is None and self.document is None:
            return
        if store is None:
            raise StoreError("the store's folder lists documents and models: give --kv-path")
        labels = labels_in(store)
        if self.model is not None:
            aliases = {self.model, public_name(self.model)}
            named = {fingerprint for fingerprint, label in labels.items() if label.model in aliases}
            if self.document is None and not named:
                raise StoreError(
                    f"no chunk in {store} is recorded for model {self.model!r}: `store stats` "
                    "prints models and fingerprints"
                )
            if named:
                yield lambda key, _: key.fingerprint in named
        if self.document is not None:
            names = self._names_of_document(store, self.document, labels)
            every = ChunkNames().union(*names.values())

            def is_of_document(key: KVKey, _: Entry) -> bool:
                label = labels.get(key.fingerprint)
                return (key.chunk_id, key.context_id) in (names[label.lead_in] if label else every)

            yield is_of_document

    def _names_of_document(
        self, store: Path, document: str, labels: dict[str, Label]
    ) -> dict[LeadInConfig, ChunkNames]:
        """Return the ids of a document's chunks, for each lead-in recorded in the store."""
        if self.model is None:
            raise StoreError("--document needs the model's tokenizer: give --model, too")
        tokenizer = load_tokenizer(self.model)
        settings = {label.lead_in for label in labels.values()} | {LeadInConfig()}
        namespace = "*" if self.namespace is None else namespace_id(self.namespace)
        files = sorted(store.glob(f"chunks-{namespace}.sqlite"))
        registries = [SharedChunkRegistry(file, read_only=True) for file in files]
        if not any(registry.document(document) for registry in registries):
            raise StoreError(f"{store} knows no document {document!r}")
        found = {}
        for config in settings:
            lead_in = _lead_in(tokenizer, config)
            names = (self._named(registry, lead_in, document) for registry in registries)
            found[config] = ChunkNames().union(*names)
        for registry in registries:
            registry.close()
        return found

    def _named(
        self, registry: SharedChunkRegistry, lead_in: LeadIn, document: str
    ) -> set[tuple[str, str]]:
        chunks = set(registry.document(document))
        names = {_name(lead_in, one) for one in chunks}
        if self.spare:  # chunks of other documents with the same texts
            variants = (one for chunk in chunks for one in registry.variants(chunk.text))
            names -= {_name(lead_in, one) for one in variants if one not in chunks}
        return names


def named(keys: Iterable[str]) -> Condition:
    """Return the predicate for chunks of these keys; raises StoreError for an invalid key."""
    wanted = {_canonical(text) for text in keys}
    return lambda key, entry: str(key) in wanted


def pin(store: TieredKVStore, condition: Condition | None = None) -> int:
    """Pin the stored chunks for which a condition holds, or all; returns how many.

    Raises StoreError when no tier keeps pins.
    """
    _check_keeps(store)
    held = store.entries().items()
    keys = [key for key, entry in held if condition is None or condition(key, entry)]
    store.pin(*keys)
    return len(keys)


def unpin(store: TieredKVStore, condition: Condition | None = None) -> int:
    """Unpin the stored chunks for which a condition holds, or all, stored or not.

    Returns how many were pinned. Raises StoreError when no tier keeps pins.
    """
    _check_keeps(store)
    keys = store.pinned()
    if condition is not None:
        held = store.entries()
        keys = {key for key in keys & held.keys() if condition(key, held[key])}
    store.unpin(*keys)
    return len(keys)


def without_pins(store: TieredKVStore) -> list[str]:
    """Return the names of the tiers that keep no pins, where pinned chunks may be evicted."""
    return [tier.name for tier in store.tiers if not tier.keeps_pins]


def _lead_in(tokenizer: Tokenizer, config: LeadInConfig) -> LeadIn:
    """Return a lead-in that computes chunk ids as engines do, without a fingerprint."""
    encoder = PromptEncoder(tokenizer, split_special_tokens=config.split_special_tokens)
    return LeadIn(encoder, config, instruction="", identity={}, namespace="")


def _name(lead_in: LeadIn, chunk: Chunk) -> tuple[str, str]:
    key = lead_in.key(chunk)
    return key.chunk_id, key.context_id


def _check_fingerprint(text: str) -> None:
    try:
        KVKey(chunk_id([]), text)
    except ValueError as error:
        raise StoreError(f"{text!r} is not a fingerprint: `store stats` prints them") from error


def _canonical(text: str) -> str:
    try:
        return str(KVKey.parse(text))
    except ValueError as error:
        raise StoreError(f"{text!r} is not a KV key: `store ls` prints them") from error


def _check_keeps(store: TieredKVStore) -> None:
    if not any(tier.keeps_pins for tier in store.tiers):
        names = ", ".join(without_pins(store))
        raise StoreError(f"no pins are kept in {names}: only a folder (disk) keeps pins")


def check_is_store(path: Path) -> None:
    """Raise StoreError unless a folder is a store of chunk KV."""
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder: give --kv-path or set CACHEBLEND_KV_PATH")
    if not (path / INDEX).exists() and not any(path.glob("??/*.safetensors")):
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
    config = settings or StoreConfig()
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


def latest_used(store: TieredKVStore, condition: Condition) -> list[KVKey]:
    """Return the keys of chunks, the most recently used first."""
    entries = {key: entry for key, entry in store.entries().items() if condition(key, entry)}
    return sorted(entries, key=lambda key: entries[key].used_at, reverse=True)


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
            store.get(key)
            fate = "warmed" if fastest.contains(key) else "missing"
        done[fate] += 1
        done["bytes"] += 0 if fate == "missing" or size is None else size
    return done
