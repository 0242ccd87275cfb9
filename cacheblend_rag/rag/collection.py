"""A collection on disk: the folder that `index` fills and `ask` reads.

``collection.sqlite`` holds settings, documents, chunks and their vectors; ``kv/`` belongs to the
engine. A document is written in one transaction, after its KV is stored: even if ``index`` is
interrupted, the collection holds whole documents only. A document whose KV could not be stored is
marked as unfinished in the same transaction. Nothing read from the file is trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from filelock import FileLock, Timeout

from cacheblend_rag.errors import CacheBlendError, ConfigError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag.prompt import INSTRUCTION
from cacheblend_rag.rag.retrieval import BUNDLED, Vectors
from cacheblend_rag.settings import EMBEDDED, check_namespace
from cacheblend_rag.text.chunk import Document

DEFAULT_FOLDER = Path(".cacheblend")
FILE_NAME = "collection.sqlite"
KV_NAME = "kv"
LOCK_NAME = "index.lock"
APPLICATION_ID = 0x63627261
VERSION = 1
WAIT_SECONDS = 60.0
VECTOR_TYPE = "<f4"
VECTOR_ITEM_BYTES = 4
TABLES = """
CREATE TABLE settings (body TEXT NOT NULL);
CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    source TEXT NOT NULL UNIQUE,
    content_hash TEXT NOT NULL
);
CREATE TABLE chunks (
    document INTEGER NOT NULL REFERENCES documents ON DELETE CASCADE,
    position INTEGER NOT NULL,
    text TEXT NOT NULL,
    vector BLOB NOT NULL,
    PRIMARY KEY (document, position)
) WITHOUT ROWID;
CREATE TABLE unfinished (
    document INTEGER PRIMARY KEY REFERENCES documents ON DELETE CASCADE,
    chunks INTEGER NOT NULL
)
"""
"""``unfinished``: documents with the number of their chunks that lack KV."""


@dataclass(frozen=True)
class CollectionSettings:
    """The settings that a collection is indexed with, and must be asked with.

    model: a name, absolute if it is a file or folder. dtype: the weights' precision, "" for the
    device's default. engine: as for open_engine. Two follow from the others once the model is
    there: lead_in, the text before the first chunk of prompts (``instruction`` as the model's chat
    template renders it), and fingerprint, the engine's, part of all KV keys.

    Raises ConfigError when the overlap is not below the chunk size, or the namespace is no text.
    """

    model: str = DEFAULT_MODEL
    embedding_model: str = BUNDLED
    chunk_size: int = 256
    chunk_overlap: int = 0
    instruction: str = INSTRUCTION
    namespace: str = "default"
    lead_in: str = ""
    dtype: str = ""
    fingerprint: str = ""
    engine: str = EMBEDDED

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not 0 <= self.chunk_overlap < self.chunk_size:
            raise ConfigError(
                f"--chunk-overlap {self.chunk_overlap} must be below --chunk-size {self.chunk_size}"
            )

    def chosen(self) -> dict[str, str | int]:
        """Return the settings that the user chooses; the others follow from them."""
        derived = ("lead_in", "fingerprint")
        return {name: value for name, value in asdict(self).items() if name not in derived}


@dataclass(frozen=True)
class StoredCollection:
    """A whole collection in memory; ``vectors`` has one row per chunk, in the documents' order."""

    documents: tuple[Document, ...]
    vectors: Vectors


class Collection(AbstractContextManager["Collection"]):
    """An open collection. Errors of the file are raised as a StoreError of one line."""

    def __init__(self, folder: Path, settings: CollectionSettings, file: sqlite3.Connection):
        self.folder = folder
        self.settings = settings
        self._file = file

    @classmethod
    def open(cls, folder: Path) -> Collection:
        """Open the collection in ``folder``; raises StoreError if there is none."""
        path = folder / FILE_NAME
        if not path.is_file():
            raise StoreError(
                f"{folder} holds no collection: make one with "
                f"`cacheblend-rag index PATH --into {folder}`"
            )
        with _reading(path):
            file = _connect(path)
            (application,) = file.execute("PRAGMA application_id").fetchone()
            (version,) = file.execute("PRAGMA user_version").fetchone()
            if (application, version) != (APPLICATION_ID, VERSION):
                raise sqlite3.DatabaseError(f"it is not a collection of version {VERSION}")
            ((body,),) = file.execute("SELECT body FROM settings").fetchall()
            return cls(folder, _settings(body), file)

    @classmethod
    def create(cls, folder: Path, settings: CollectionSettings) -> Collection:
        """Create an empty collection in ``folder``, which must not hold one."""
        prepare_folder(folder)
        path = folder / FILE_NAME
        begun = path.with_suffix(".new")
        with _reading(path):
            begun.unlink(missing_ok=True)
            os.close(os.open(begun, os.O_CREAT | os.O_WRONLY, 0o600))
            with closing(_connect(begun)) as file, _transaction(file):
                for statement in TABLES.split(";"):
                    file.execute(statement)
                file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                file.execute(f"PRAGMA user_version = {VERSION}")
                file.execute("INSERT INTO settings VALUES (?)", (json.dumps(asdict(settings)),))
            begun.replace(path)
        return cls.open(folder)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def path_of(self, source: str) -> Path:
        """Return the path of the file called ``source``."""
        return self.folder.resolve().parent / source

    def content_hashes(self) -> dict[str, str]:
        """Return the hash of each document's file, by source."""
        with self._reading():
            return dict(self._file.execute("SELECT source, content_hash FROM documents").fetchall())

    def counts(self) -> tuple[int, int]:
        """Return how many documents and how many chunks there are."""
        with self._reading():
            ((documents,),) = self._file.execute("SELECT COUNT(*) FROM documents").fetchall()
            ((chunks,),) = self._file.execute("SELECT COUNT(*) FROM chunks").fetchall()
            return documents, chunks

    def unfinished(self) -> dict[str, int]:
        """Return for each unfinished document, by source, how many chunks lack KV."""
        with self._reading():
            rows = self._file.execute(
                "SELECT source, unfinished.chunks FROM unfinished"
                " JOIN documents ON documents.id = unfinished.document ORDER BY source"
            ).fetchall()
            if not all(isinstance(s, str) and isinstance(n, int) and n > 0 for s, n in rows):
                raise sqlite3.DatabaseError("its list of unfinished documents is broken")
            return dict(rows)

    def note_unfinished(self, source: str, chunks: int) -> None:
        """Record how many chunks of a document lack KV; 0 means none."""
        with self._reading(), _transaction(self._file):
            self._note_unfinished(source, chunks)

    def document(self, source: str) -> Document:
        """Read one document's chunks; raises StoreError if they are missing or damaged."""
        with self._reading():
            rows = self._file.execute(
                "SELECT position, text FROM chunks JOIN documents"
                " ON documents.id = chunks.document WHERE source = ? ORDER BY position",
                (source,),
            ).fetchall()
            texts = [text for _, text in rows if isinstance(text, str) and text.strip()]
            if not texts or [position for position, _ in rows] != list(range(len(texts))):
                raise sqlite3.DatabaseError(f"the chunks of {source!r} are broken")
            return Document(source, tuple(texts))

    def replace(
        self, document: Document, content_hash: str, vectors: Vectors, *, unfinished: int = 0
    ) -> None:
        """Write a document, replacing the one with the same id (its source).

        unfinished: how many of its chunks lack KV that could not be stored. Raises ConfigError when
        the size of its vectors differs from that of the collection's.
        """
        with self._reading(), _transaction(self._file):
            self._check_size(vectors)
            self._file.execute("DELETE FROM documents WHERE source = ?", (document.document_id,))
            written = self._file.execute(
                "INSERT INTO documents (source, content_hash) VALUES (?, ?)",
                (document.document_id, content_hash),
            )
            rows = [
                (written.lastrowid, position, text, vector.astype(VECTOR_TYPE).tobytes())
                for position, (text, vector) in enumerate(
                    zip(document.chunks, vectors, strict=True)
                )
            ]
            self._file.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?)", rows)
            self._note_unfinished(document.document_id, unfinished)

    def remove(self, source: str) -> None:
        """Delete a document, if it exists."""
        with self._reading(), _transaction(self._file):
            self._file.execute("DELETE FROM documents WHERE source = ?", (source,))

    def load(self) -> StoredCollection:
        """Read all documents and vectors; raises StoreError if there is none, or one is damaged."""
        texts: dict[str, list[str]] = {}
        vectors: list[bytes] = []
        with self._reading():
            rows = self._file.execute(
                "SELECT source, position, text, vector FROM chunks"
                " JOIN documents ON documents.id = chunks.document ORDER BY source, position"
            )
            for source, position, text, vector in rows:
                of_document = texts.setdefault(source, [])
                if not _is_chunk(source, text, vector) or position != len(of_document):
                    raise sqlite3.DatabaseError(f"chunk {position} of {source!r} is broken")
                of_document.append(text)
                vectors.append(vector)
            if len({len(vector) for vector in vectors}) > 1:
                raise sqlite3.DatabaseError("vectors differ in length")
        if not vectors:
            raise StoreError(f"{self.folder} holds no documents: add some with `index`")
        documents = tuple(Document(source, tuple(found)) for source, found in texts.items())
        import numpy as np

        matrix = np.frombuffer(b"".join(vectors), VECTOR_TYPE).reshape(len(vectors), -1)
        if not np.isfinite(matrix).all():
            raise _damaged(self.folder / FILE_NAME, "a vector holds no numbers")
        return StoredCollection(documents, matrix.astype(np.float32))

    def _note_unfinished(self, source: str, chunks: int) -> None:
        self._file.execute(
            "DELETE FROM unfinished WHERE document IN (SELECT id FROM documents WHERE source = ?)",
            (source,),
        )
        if chunks:
            self._file.execute(
                "INSERT INTO unfinished SELECT id, ? FROM documents WHERE source = ?",
                (chunks, source),
            )

    def _check_size(self, vectors: Vectors) -> None:
        found = self._file.execute("SELECT LENGTH(vector) FROM chunks LIMIT 1").fetchone()
        size = vectors.shape[1] * VECTOR_ITEM_BYTES
        if found is not None and found[0] != size:
            raise ConfigError(
                f"embedding model {self.settings.embedding_model!r} is not the one that "
                f"{self.folder} was indexed with: index with --rebuild"
            )

    def _reading(self) -> AbstractContextManager[None]:
        return _reading(self.folder / FILE_NAME)


def source_name(folder: Path, path: Path) -> str:
    """Return a file's source name in the collection in ``folder``, which is its document's id.

    That is its path relative to the collection's parent folder, or the absolute path if it is not
    below that folder.
    """
    parent, path = folder.resolve().parent, path.parent.resolve() / path.name
    name = path.relative_to(parent) if path.is_relative_to(parent) else path
    return os.fsencode(name.as_posix()).decode("utf-8", "backslashreplace")


def known_paths(folder: Path) -> tuple[Path, ...]:
    """Return the files of all documents in ``folder``; empty if it holds no collection."""
    if not (folder / FILE_NAME).exists():
        return ()
    with Collection.open(folder) as collection:
        return tuple(collection.path_of(source) for source in collection.content_hashes())


def prepare_folder(folder: Path) -> None:
    """Create the folder, readable by its owner only and ignored by Git; raises StoreError."""
    try:
        if not folder.exists():
            make_folder(folder)
            (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise StoreError(f"{folder} cannot be created: {error.strerror}") from error
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder")


def clear(folder: Path) -> None:
    """Delete a collection: KV first, so that an interruption leaves documents without KV."""
    try:
        if (folder / KV_NAME).exists():
            shutil.rmtree(folder / KV_NAME)
        for name in (FILE_NAME, f"{FILE_NAME}-journal"):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be cleared: {error}") from error


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock out other ``index`` runs in ``folder``; raises StoreError if one is running."""
    prepare_folder(folder)
    try:
        with FileLock(folder / LOCK_NAME, timeout=0, mode=0o600):
            yield
    except Timeout as error:
        raise StoreError(f"another `index` is running in {folder}: wait until it ends") from error


def _connect(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)
    for pragma in ("trusted_schema = OFF", "foreign_keys = ON", "secure_delete = ON"):
        file.execute(f"PRAGMA {pragma}")
    return file


@contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn SQLite's errors, and errors of malformed rows, into a StoreError."""
    try:
        yield
    except CacheBlendError:
        raise
    except (sqlite3.OperationalError, OSError) as error:  # locked, full, gone, not ours to write
        raise StoreError(f"{path} cannot be used: {error}") from error
    except (sqlite3.DatabaseError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, reason: object) -> StoreError:
    return StoreError(
        f"{path} cannot be used ({reason}): make it again with `cacheblend-rag index PATH --into "
        f"{path.parent} --rebuild`"
    )


def _settings(body: object) -> CollectionSettings:
    """Read settings; raises ValueError if this version did not write them."""
    plain = json.loads(body) if isinstance(body, str) else None
    wanted = {f.name: int if f.type == "int" else str for f in fields(CollectionSettings)}
    if not isinstance(plain, dict) or {k: type(v) for k, v in plain.items()} != wanted:
        raise ValueError("its settings are broken")
    try:
        return CollectionSettings(**plain)
    except ConfigError as error:
        raise ValueError("its settings are broken") from error


def _is_chunk(source: object, text: object, vector: object) -> bool:
    return (
        isinstance(source, str)
        and isinstance(text, str)
        and bool(text.strip())
        and isinstance(vector, bytes)
        and len(vector) > 0
        and len(vector) % VECTOR_ITEM_BYTES == 0
    )
