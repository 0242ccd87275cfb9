"""Selects stored chunks by key, document, namespace, model or age; pins those selected.

Pinned chunks no process evicts for capacity or age.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.engines.labels import Label, labels_in
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import Entry, KVKey, chunk_id
from cacheblend_rag.kv.chunk_kv import namespace_id
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.models import public_name
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.settings import LeadInConfig
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
