"""Runs `index` on a collection.

A file is indexed whole: its KV is stored chunk by chunk as it is computed, then its text and
vectors are written in one transaction. After an interruption, finished files are recognized by
their content hash and skipped; of the unfinished file only missing chunks are computed. If KV could
not be stored, the document is marked as unfinished, and the next run computes it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.model_files import (
    kv_bytes_per_token,
    quiet_libraries,
    text_config,
)
from cacheblend_rag.errors import ConfigError, PromptError, StoreError
from cacheblend_rag.progress import ProgressCallbacks
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.collection import (
    FILE_NAME,
    Collection,
    CollectionSettings,
    clear,
    source_name,
)
from cacheblend_rag.rag.collection_engine import (
    Placement,
    open_known,
    open_new,
    with_lead_in,
)
from cacheblend_rag.rag.index_report import IndexReport, KVStoring
from cacheblend_rag.rag.readers import (
    EXTRA,
    FileReader,
    FoundFiles,
    UnreadableFileError,
    make_splitter,
)
from cacheblend_rag.rag.retrieval import Embedder, Vectors
from cacheblend_rag.settings import EMBEDDED
from cacheblend_rag.text.chunk import Document

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine

FIRST_PART_CHUNKS, MOST_PART_CHUNKS = 8, 64
PART_SECONDS = 5.0
SHOWN_CHARACTERS = 30
MOST_NAMED = 10
"""How many skipped files get a warning of their own."""
NAME_BREAKS = re.compile(r"[-_.\s]+")


class Indexing(AbstractContextManager["Indexing"]):
    """A collection being indexed; models are loaded when the first file needs them.

    asked: the settings that the user gave; an existing collection must agree with
    them. progress: gets progress. rebuild: delete the collection once there is something to
    replace it, and make it again, with its old settings where none are given. register_only:
    register chunks without computing them.

    Raises ConfigError when the collection does not agree, StoreError when it is damaged.
    """

    def __init__(
        self,
        folder: Path,
        asked: Mapping[str, Any],
        progress: ProgressCallbacks,
        *,
        placement: Placement | None = None,
        rebuild: bool = False,
        register_only: bool = False,
    ) -> None:
        self.report = IndexReport()
        self._folder = folder
        self._progress = progress
        self._placement = placement or Placement()
        self._rebuild, self._register_only = rebuild, register_only
        self._reader = FileReader()
        self._collection: Collection | None = None
        self._models: _Models | None = None
        self._skipped: set[Path] = set()
        self._stored: set[str] = set()
        if rebuild:
            asked = {**_chosen_before(folder, asked), **asked}
        elif (folder / FILE_NAME).exists():
            self._collection = Collection.open(folder)
            _check_agreement(folder, self._collection.settings, asked)
        self._choices = CollectionSettings(**asked)

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        if self._models:
            self._models.engine.close()
        if self._collection:
            self._collection.close()

    def run(
        self, paths: Iterable[Path], found: FoundFiles, *, prune: bool, repair: bool = False
    ) -> None:
        """Index the files found at ``paths``, and compute KV that earlier runs could not store.

        prune: see remove_vanished. repair: see finish.
        """
        self._note(found)
        self.add(found.files)
        self.remove_vanished(paths, found.files, prune=prune)
        self.finish(repair=repair)
        if len(self._skipped) > MOST_NAMED:
            more = len(self._skipped) - MOST_NAMED
            self._progress.warn(f"{more} more files skipped: --json names all, with the reasons")
        if self._collection:
            self.report.documents, self.report.chunks = self._collection.counts()
            left = self._collection.unfinished()
            self.report.unfinished_documents = len(left)
            self.report.unfinished_chunks = sum(left.values())

    def add(self, files: Sequence[Path]) -> None:
        """Index new and changed files."""
        for new in self._new_files(files):
            try:
                self._add(new)
            except UnreadableFileError as error:
                self.skip(new.path, str(error))

    def remove_vanished(self, paths: Iterable[Path], files: Iterable[Path], *, prune: bool) -> None:
        """Find documents below ``paths`` whose files are gone; delete them if ``prune``."""
        if self._collection is None:
            return
        there = {source_name(self._folder, path) for path in files}
        above = [path.resolve() for path in paths]
        for source in self._collection.content_hashes():
            path = self._collection.path_of(source)
            if source in there or not any(path.is_relative_to(folder) for folder in above):
                continue
            if not _is_gone(path):
                continue
            if not prune:
                self.report.vanished += 1
                continue
            _, models = self._ready()
            models.engine.evict_document(source)
            self._collection.remove(source)
            self.report.removed += 1

    def finish(self, *, repair: bool) -> None:
        """Compute the KV that earlier runs could not store.

        repair: instead check the stored KV of each document that this run did not store, compute
        missing or damaged chunks, and drop KV of no document from the collection's folder.
        """
        if self._register_only:
            return
        left = list(self._left_over(repair=repair))
        task = self._files_task = self._progress.begin("documents whose KV is missing", len(left))
        for document in left:
            collection, models = self._ready()
            task.note(document.document_id)
            failed = 0
            chunks = document.to_chunks()
            for start in range(0, len(chunks), MOST_PART_CHUNKS):
                part = chunks[start : start + MOST_PART_CHUNKS]
                failed += models.storing.store(part, verify=repair)
            collection.note_unfinished(document.document_id, failed)
            task.advance()
        task.end()
        if repair and self._collection is not None and self._has_own_store(self._collection):
            self.report.evicted_chunks = self._ready()[1].engine.evict_unregistered()

    def _has_own_store(self, collection: Collection) -> bool:
        """Whether no other collection keeps KV where this one does: in its folder."""
        return collection.settings.engine == EMBEDDED and self._placement.store.tiers is None

    def _left_over(self, *, repair: bool) -> Iterator[Document]:
        """Read the documents to finish or, with ``repair``, to check."""
        if self._collection is None:
            return
        all_of = self._collection.content_hashes() if repair else self._collection.unfinished()
        for source in sorted(set(all_of) - self._stored):
            yield self._collection.document(source)

    def skip(self, path: Path, reason: str) -> None:
        """Record a file that is not indexed; the first few get a warning."""
        if path not in self._skipped:
            self._skipped.add(path)
            if len(self._skipped) <= MOST_NAMED:
                self._progress.warn(f"{path} skipped: {reason}")
        self.report.skipped.append({"path": str(path), "reason": reason})

    def _note_file(self, path: Path, note: str) -> None:
        """Warn about a file that is indexed, but perhaps not as its owner expects."""
        if note:
            self.report.notes.append({"path": str(path), "note": note})
            if len(self.report.notes) <= MOST_NAMED:
                self._progress.warn(f"{path}: {note}")

    def _note(self, found: FoundFiles) -> None:
        """Record the files that are not indexed."""
        self.report.unknown = found.unknown
        for folder, reason in found.unopened:
            self.skip(folder, reason)

    def _new_files(self, files: Sequence[Path]) -> Iterator[_NewFile]:
        """Read new and changed files, one after another."""
        known = self._collection.content_hashes() if self._collection else {}
        task = self._files_task = self._progress.begin("files", len(files))
        for path in files:
            source = source_name(self._folder, path)
            try:
                content_hash = _content_hash(path)
                if content_hash == known.get(source):
                    self.report.unchanged += 1
                else:
                    task.note(f"reading {source}")
                    found = self._reader.read(path)
                    self._note_file(path, found.note)
                    yield _NewFile(path, source, content_hash, found.text, source in known)
            except UnreadableFileError as error:
                self.skip(path, str(error))
            task.advance()
        task.end()

    def _add(self, new: _NewFile) -> None:
        collection, models = self._ready()
        try:
            document = Document(new.source, tuple(models.split(new.text)))
        except (ValueError, PromptError) as error:
            raise UnreadableFileError(f"cannot be split: {error}") from error
        vectors, unfinished = self._precompute(document, models)
        collection.replace(document, new.content_hash, vectors, unfinished=unfinished)
        self._stored.add(document.document_id)
        if new.is_known:
            self.report.changed += 1
        else:
            self.report.added += 1

    def _precompute(self, document: Document, models: _Models) -> tuple[Vectors, int]:
        """Embed the chunks and store their KV, one part at a time.

        Returns the vectors, and how many chunks lack KV that could not be stored. Each chunk is
        embedded together with its file's name, which often adds context: who "she" is,
        which product a manual is about. Prompts do not contain the name.
        """
        chunks = document.to_chunks()
        title = NAME_BREAKS.sub(" ", Path(document.document_id).stem)
        task = self._progress.begin(title[:SHOWN_CHARACTERS], len(chunks))
        vectors: list[Vectors] = []
        count, unfinished = FIRST_PART_CHUNKS, 0
        while part := chunks[sum(map(len, vectors)) :][:count]:
            started = time.perf_counter()
            task.note("embedding")
            vectors.append(models.embedder.embed([f"{title}\n{chunk.text}" for chunk in part]))
            if not self._register_only:
                task.note("computing")
                unfinished += models.storing.store(part)
                self._files_task.note(self.report.pace)
            task.advance(len(part))
            count = _next_count(count, time.perf_counter() - started)
        # The document replaces the file's earlier version.
        if self._register_only:
            done = models.engine.precompute([document], progress=False, register_only=True)
            self.report.registered_chunks += done.registered
        else:
            models.engine.evict_document(document.document_id, document.collection, kept=chunks)
        task.end()
        import numpy as np

        return np.concatenate(vectors), unfinished

    def _ready(self) -> tuple[Collection, _Models]:
        """Load the models, and create the collection if there is none."""
        if self._collection is not None and self._models is not None:
            return self._collection, self._models
        with self._progress.phase("loading the libraries"):
            quiet_libraries()
        if self._collection is None:
            settings = with_lead_in(self._choices)
            if self._rebuild:
                clear(self._folder)
            with self._progress.phase(f"loading the model {settings.model}"):
                settings, engine = open_new(self._folder, settings, self._placement)
            try:  # a server may have reduced the context window
                checks.check_fits(settings.chunk_size, engine.context_window, settings.model)
            except ConfigError:
                engine.close()
                raise
            self._models = self._load(engine, settings)
            self._collection = Collection.create(self._folder, settings)
        else:
            settings = self._collection.settings
            checks.check_model(settings.model)
            with self._progress.phase(f"loading the model {settings.model}"):
                engine = open_known(self._folder, settings, self._placement)
            self._models = self._load(engine, settings)
        return self._collection, self._models

    def _load(self, engine: Engine, settings: CollectionSettings) -> _Models:
        """Load the embedding model and the splitter for an engine."""
        with self._progress.phase(f"loading the embedding model {settings.embedding_model}"):
            embedder = Embedder(settings.embedding_model, EXTRA)
        split = make_splitter(engine.tokenize, settings.chunk_size, settings.chunk_overlap)
        config = text_config(settings.model)
        import torch

        from cacheblend_rag.engines.transformers import loading

        device = loading.pick_device(self._placement.device)
        named = loading.named_dtype(settings.dtype) if settings.dtype else None
        dtype = named or loading.default_dtype(config, device) or torch.float32
        storing = KVStoring(engine, self.report, kv_bytes_per_token(config, dtype))
        return _Models(engine, embedder, split, storing)


@dataclass(frozen=True)
class _NewFile:
    """A file to index, and whether the collection holds an older version of it."""

    path: Path
    source: str
    content_hash: str
    text: str
    is_known: bool


@dataclass(frozen=True)
class _Models:
    engine: Engine
    embedder: Embedder
    split: Callable[[str], list[str]]
    storing: KVStoring


def _chosen_before(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a collection's settings; empty if there is none or it is damaged.

    Settings that depend on its model are left out if another model is given.
    """
    try:
        with Collection.open(folder) as before:
            chosen: dict[str, Any] = before.settings.chosen()
    except StoreError:
        return {}
    model = chosen["model"]
    if asked.get("model", model) != model:
        del chosen["dtype"]
    return chosen


def _check_agreement(folder: Path, settings: CollectionSettings, asked: Mapping[str, Any]) -> None:
    there = settings.chosen()
    for name, value in asked.items():
        if value != there[name]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{folder} was indexed with {option} {there[name]!r}, not {value!r}: leave the "
                "option out, index with --rebuild, or --into another folder"
            )


def _next_count(count: int, seconds: float) -> int:
    """Return how many chunks to compute at once, so that progress shows every few seconds."""
    return min(2 * count, MOST_PART_CHUNKS) if seconds < PART_SECONDS else max(count // 2, 1)


def _content_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UnreadableFileError(error.strerror or str(error)) from error


def _is_gone(path: Path) -> bool:
    """Whether a file certainly does not exist; an unreadable folder proves nothing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
