"""Runs `index` on a collection.

A file is indexed whole: its KV is stored chunk by chunk as it is computed, then its text and
vectors are written at once. After an interruption, finished files are recognized by
their content hash and skipped; of the unfinished file only missing chunks are computed. If KV could
not be stored, the document is marked as unfinished, and the next run computes it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.errors import ConfigError, PromptError, StoreError
from cacheblend_rag.progress import ProgressCallbacks
from cacheblend_rag.rag import FILE_NAME, checks
from cacheblend_rag.rag.answering import Embedder
from cacheblend_rag.rag.collection import (
    Collection,
    CollectionSettings,
    clear,
    open_quietly,
    source_name,
)
from cacheblend_rag.rag.readers import (
    EXTRA,
    PARAGRAPH,
    FoundFiles,
    UnreadableFileError,
    read_file,
)
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import PrecomputeReport
from cacheblend_rag.settings import EMBEDDED
from cacheblend_rag.text.chunk import Document

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine

PAUSE_SECONDS = 10.0
"""Seconds without computing KV after a tier has failed to store it."""
MOST_NAMED = 10
"""How many skipped files get a warning of their own."""
NAME_BREAKS = re.compile(r"[-_.\s]+")


@dataclass
class IndexReport:
    """The results of one run.

    added, changed, unchanged: files. removed: documents deleted because their files are gone;
    vanished: such documents that were kept. unknown: files with an unsupported extension. skipped:
    files that could not be indexed, and why. notes: files that were indexed without all of their
    pages, or in an encoding that was guessed. kv: what was computed and stored. evicted_chunks: of
    no document, whose KV a repair dropped. documents, chunks: totals of the collection at the end.
    unfinished_documents, unfinished_chunks: those whose KV could not be stored, in this run or
    before; the next run computes it.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    vanished: int = 0
    unknown: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    notes: list[dict[str, str]] = field(default_factory=list)
    kv: PrecomputeReport = field(default_factory=PrecomputeReport)
    evicted_chunks: int = 0
    documents: int = 0
    chunks: int = 0
    unfinished_documents: int = 0
    unfinished_chunks: int = 0

    @property
    def pace(self) -> str:
        """The speed at which KV was computed."""
        return f"{self.kv.computed_tokens / (self.kv.seconds or 1.0):,.0f} tokens per second"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain, kv = asdict(self), self.kv
        del plain["kv"]
        return {
            **plain,
            "computed_chunks": kv.computed,
            "computed_tokens": kv.computed_tokens,
            "compute_seconds": kv.seconds,
            "stored_chunks": kv.skipped,
            "registered_chunks": kv.registered,
            "refused_chunks": {str(reason): count for reason, count in kv.refused.items()},
            "refused_codes": {code.value: count for code, count in kv.refused_codes.items()},
            "failures": [str(reason) for reason in kv.failed],
        }


class Indexing(AbstractContextManager["Indexing"]):
    """A collection being indexed; models are loaded when the first file needs them.

    settings: those that are given, with which an existing collection must agree. given: settings of
    its engine in this run, by name. rebuild: delete the collection once there is something to
    replace it, and make it again, with its old settings where none are given.

    Raises ConfigError when the collection does not agree, StoreError when it is damaged.
    """

    def __init__(
        self,
        folder: Path,
        settings: CollectionSettings,
        given: Mapping[str, Any],
        progress: ProgressCallbacks,
        *,
        rebuild: bool = False,
    ) -> None:
        self.report = IndexReport()
        self._settings, self._given = settings, given
        self._folder, self._progress, self._rebuild = folder, progress, rebuild
        self._collection: Collection | None = None
        self._engine: Engine | None = None
        self._stored: set[str] = set()
        self._cause, self._paused_until = Reason(ReasonCode.STORE_ERROR, ""), 0.0
        if rebuild:
            asked = settings.given()
            self._settings = CollectionSettings(**{**_chosen_before(folder, asked), **asked})
        elif (folder / FILE_NAME).exists():
            self._collection = Collection(folder)
            _check_agreement(self._collection, settings.given())
            self._settings = self._collection.settings

    def __exit__(self, *_: object) -> None:
        if self._engine:
            self._engine.close()
        if self._collection:
            self._collection.close()

    def run(
        self, paths: Iterable[Path], found: FoundFiles, *, prune: bool, repair: bool = False
    ) -> None:
        """Index the files found at ``paths``, and compute KV that earlier runs could not store.

        prune: delete documents below ``paths`` whose files are gone. repair: also check the stored
        KV of each document that this run did not store, compute missing or damaged chunks, and drop
        KV of no document from the collection's folder.
        """
        self.report.unknown = found.unknown
        for path, reason in found.unopened:
            self._skip(path, reason)
        self._add_files(found.files)
        if self._collection is not None:
            self._look_for_vanished(self._collection, paths, found.files, prune=prune)
            if repair or not self._settings.register_only:
                self._finish(self._collection, repair=repair)
            left = self._collection.unfinished()
            self.report.documents, self.report.chunks = self._collection.counts()
            self.report.unfinished_documents = len(left)
            self.report.unfinished_chunks = sum(left.values())
        if more := max(0, len(self.report.skipped) - MOST_NAMED):
            self._progress.warn(f"{more} more files skipped: --json names all, with the reasons")

    def _add_files(self, files: Sequence[Path]) -> None:
        """Index new and changed files."""
        known = self._collection.content_hashes() if self._collection else {}
        task = self._progress.begin("files", len(files))
        for path in files:
            source = source_name(self._folder, path)
            try:
                content_hash = _content_hash(path)
                if content_hash == known.get(source):
                    self.report.unchanged += 1
                else:
                    task.note(f"reading {source}")
                    self._add(path, source, content_hash)
                    task.note(self.report.pace)
                    self.report.changed += source in known
                    self.report.added += source not in known
            except UnreadableFileError as error:
                self._skip(path, str(error))
            task.advance()
        task.end()

    def _add(self, path: Path, source: str, content_hash: str) -> None:
        """Store a file's KV, then write the document; raises UnreadableFileError.

        Each chunk is embedded together with its file's name, which often adds context: who "she"
        is, which product a manual is about. Prompts do not contain the name.
        """
        read = read_file(path)
        if read.note:
            self.report.notes.append({"path": str(path), "note": read.note})
            if len(self.report.notes) <= MOST_NAMED:
                self._progress.warn(f"{path}: {read.note}")
        collection, engine = self._ready()
        try:
            document = Document(source, tuple(self._splitter.split_text(read.text)))
        except (ValueError, PromptError) as error:
            raise UnreadableFileError(f"cannot be split: {error}") from error
        title = NAME_BREAKS.sub(" ", Path(source).stem)
        vectors = self._embedder.embed([f"{title}\n{text}" for text in document.chunks])
        register_only = self._settings.register_only
        unfinished = self._store(engine, document, register_only=register_only)
        collection.replace(document, content_hash, vectors, unfinished=unfinished)
        self._stored |= set() if register_only else {source}

    def _store(
        self,
        engine: Engine,
        document: Document,
        *,
        verify: bool = False,
        register_only: bool = False,
    ) -> int:
        """Store a document's KV, replacing that of its earlier version.

        verify: stored chunks are read and checked, and recomputed if damaged. After a document of
        which nothing was stored because a tier failed, others are only registered for
        PAUSE_SECONDS. Returns how many chunks' KV could not be stored.
        """
        is_paused = time.monotonic() < self._paused_until
        done = engine.precompute(
            [document], progress=False, verify=verify, register_only=register_only or is_paused
        )
        lasting = [cause for cause in done.failed if cause.code != ReasonCode.NO_ROOM]
        if lasting and not done.computed:
            self._cause, self._paused_until = lasting[0], time.monotonic() + PAUSE_SECONDS
        elif is_paused and not register_only:
            failed = {self._cause: len(document.chunks)}
            done = PrecomputeReport(refused=failed, failed=failed)
        self.report.kv += done
        return sum(done.failed.values())

    def _look_for_vanished(
        self, collection: Collection, paths: Iterable[Path], files: Iterable[Path], *, prune: bool
    ) -> None:
        """Find documents below ``paths`` whose files are gone; delete them if ``prune``."""
        there = {source_name(self._folder, path) for path in files}
        above = [path.resolve() for path in paths]
        for source in sorted(collection.content_hashes().keys() - there):
            path = collection.path_of(source)
            if not any(path.is_relative_to(one) for one in above) or not _is_gone(path):
                continue
            if prune:
                self._ready()[1].evict_document(source)
                collection.remove(source)
            self.report.removed += prune
            self.report.vanished += not prune

    def _finish(self, collection: Collection, *, repair: bool) -> None:
        """Compute the KV that earlier runs could not store; repair: see ``run``."""
        wanted = collection.content_hashes() if repair else collection.unfinished()
        sources = wanted.keys() - self._stored
        documents = collection.load()[0] if sources else ()
        task = self._progress.begin("documents whose KV is missing", len(sources))
        for document in documents:
            if document.document_id in sources:
                task.note(document.document_id)
                failed = self._store(self._ready()[1], document, verify=repair)
                collection.note_unfinished(document.document_id, failed)
                task.advance()
        task.end()
        # Nobody else keeps KV in the collection's folder.
        own = self._settings.engine == EMBEDDED and self._given.get("tiers") is None
        if repair and own:
            self.report.evicted_chunks = self._ready()[1].evict_unregistered()

    def _skip(self, path: Path, reason: str) -> None:
        """Record a file that is not indexed; the first few get a warning."""
        self.report.skipped.append({"path": str(path), "reason": reason})
        if len(self.report.skipped) <= MOST_NAMED:
            self._progress.warn(f"{path} skipped: {reason}")

    def _ready(self) -> tuple[Collection, Engine]:
        """Load the models, and create the collection if there is none."""
        if self._collection is not None and self._engine is not None:
            return self._collection, self._engine
        settings = self._settings
        with self._progress.phase("loading the libraries"):
            quiet_libraries()
            from llama_index.core.node_parser import SentenceSplitter
        with self._progress.phase(f"loading the embedding model {settings.embedding_model}"):
            self._embedder = Embedder(settings.embedding_model, EXTRA)
        with self._progress.phase(f"loading the model {settings.model}"):
            if self._collection is not None:
                checks.check_model(settings.model)
                self._engine = self._collection.open_engine(self._given)
            else:
                load_tokenizer(settings.model)  # before anything is deleted
                if self._rebuild:
                    clear(self._folder)
                self._engine = open_quietly(settings.engine_config(self._folder, self._given))
        engine, size = self._engine, settings.chunk_size
        # A server may have reduced the context window.
        checks.check_chunk_size("chunk_size", size, settings.model, engine.context_window)
        if self._collection is None:
            settings = settings.with_changes(dtype=engine.dtype or settings.dtype)
            self._collection = Collection.create(self._folder, settings, engine.fingerprint)
        self._splitter = SentenceSplitter(
            chunk_size=size,
            chunk_overlap=settings.chunk_overlap,
            tokenizer=engine.tokenize,
            paragraph_separator=PARAGRAPH,
        )
        return self._collection, engine


def _chosen_before(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a collection's settings; empty if there is none or it is damaged.

    The precision is left out if another model is given.
    """
    try:
        with Collection(folder) as before:
            chosen = before.settings.model_dump()
    except StoreError:
        return {}
    if asked.get("model", chosen["model"]) != chosen["model"]:
        del chosen["dtype"]
    return chosen


def _check_agreement(collection: Collection, asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        there = getattr(collection.settings, name)
        if value != there:
            raise ConfigError(
                f"{collection.folder} was indexed with {name}={there!r}, not {value!r}: leave it "
                "out, index with --rebuild, or --into another folder"
            )


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
