"""A collection on disk: the folder that `index` fills and `ask` reads.

``collection.sqlite`` holds settings, and for each document a row with its chunks and their vectors;
``kv/`` belongs to the engine. A row is written after the document's KV is stored: even if ``index``
is interrupted, the collection holds whole documents only. Nothing read from the file is trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

from filelock import FileLock, Timeout
from pydantic import Field, Json, StringConstraints, TypeAdapter, ValidationError, model_validator

from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import CacheBlendError, ConfigError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import BUNDLED, FILE_NAME, KV_NAME
from cacheblend_rag.rag.prompt import INSTRUCTION, RagPrompt
from cacheblend_rag.settings import EMBEDDED, EngineConfig
from cacheblend_rag.settings.base import Count, Settings
from cacheblend_rag.settings.engine import Namespace
from cacheblend_rag.sqlite_file import connect
from cacheblend_rag.text.chunk import Document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheblend_rag.engines.base import Engine

Vectors: TypeAlias = "NDArray[np.float32]"
LOCK_NAME = "index.lock"
APPLICATION_ID = 0x63627261
VERSION = 3
WAIT_SECONDS = 60.0
TABLES = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE settings (body TEXT, fingerprint TEXT);
CREATE TABLE documents (
    source TEXT PRIMARY KEY, content_hash TEXT, unfinished INTEGER, chunks TEXT, vectors BLOB
);
"""
"""``unfinished``: how many chunks lack KV that could not be stored. ``chunks``: a list in JSON."""
Name = Annotated[str, Field(strict=True)]
Text = Annotated[Name, StringConstraints(pattern=r"\S")]
Number = Annotated[int, Field(strict=True, ge=0)]
Chunks = Annotated[list[Text], Field(min_length=1)]
SETTINGS_ROWS = TypeAdapter(list[tuple[Name, Name]])
STATE_ROWS = TypeAdapter(list[tuple[Name, Name, Number]])
Blob = Annotated[bytes, Field(strict=True)]
DOCUMENT_ROWS = TypeAdapter(list[tuple[Name, Name, Number, Json[Chunks], Blob]])


class CollectionSettings(Settings):
    """The settings that a collection is made with; later runs take them from it."""

    _noun: ClassVar[str] = "setting of a collection"

    model: Name = DEFAULT_MODEL
    """Absolute, if it is a file or folder."""
    engine: Name = EMBEDDED
    """As for open_engine."""
    embedding_model: Name = BUNDLED
    """``bundled``, or a sentence-transformers name or folder."""
    chunk_size: Annotated[int, Field(ge=16)] = 256
    """Most tokens of a chunk."""
    chunk_overlap: Count = 0
    """Tokens that a chunk repeats of the one before it."""
    instruction: Name = INSTRUCTION
    """What prompts say before the passages."""
    namespace: Namespace = "default"
    """Collections of other namespaces share no KV."""
    dtype: Name | None = None
    """Precision of the model's weights; None is the device's default."""
    register_only: bool = False
    """Compute no KV: engines with ``fill_on_miss``, and chats, do it on a miss."""

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.chunk_overlap >= self.chunk_size:
            raise ConfigError(
                f"chunk_overlap={self.chunk_overlap} must be below chunk_size={self.chunk_size}"
            )
        return self

    def engine_config(self, folder: Path, given: Mapping[str, Any]) -> EngineConfig:
        """Return the settings of the engine of a collection in ``folder``.

        given: others, of one run, by the names of EngineConfig and StoreConfig. Raises ConfigError
        for one that the collection has itself.
        """
        fixed = {"model", "namespace", "dtype", "instruction", "kv_path"}
        if taken := sorted(fixed & given.keys()):
            raise ConfigError(f"{taken[0]}: a collection has its own, leave it out")
        return EngineConfig.gather(
            model=self.model,
            namespace=self.namespace,
            dtype=self.dtype,
            instruction=lambda tokenizer: RagPrompt(tokenizer, self.instruction).lead_in,
            kv_path=folder / KV_NAME,
            **{"engine": self.engine, **given},
        )


class Collection(AbstractContextManager["Collection"]):
    """An open collection. Errors of the file are raised as a StoreError of one line.

    settings: those it was made with. fingerprint: its engine's, part of all KV keys.
    """

    def __init__(self, folder: Path) -> None:
        """Open the collection in ``folder``; raises StoreError if there is none."""
        self.folder, path = folder, folder / FILE_NAME
        if not path.is_file():
            raise StoreError(
                f"{folder} holds no collection: make one with "
                f"`cacheblend-rag index PATH --into {folder}`"
            )
        with _reading(path):
            self._file = _connect(path)
            (application,) = self._file.execute("PRAGMA application_id").fetchone()
            (version,) = self._file.execute("PRAGMA user_version").fetchone()
            if (application, version) != (APPLICATION_ID, VERSION):
                raise ValueError(f"it is not a collection of version {VERSION}")
            rows = self._file.execute("SELECT body, fingerprint FROM settings").fetchall()
            ((body, self.fingerprint),) = SETTINGS_ROWS.validate_python(rows)
            try:
                self.settings = CollectionSettings(**json.loads(body))
            except (ConfigError, TypeError) as error:
                raise ValueError("its settings are broken") from error

    @classmethod
    def create(cls, folder: Path, settings: CollectionSettings, fingerprint: str) -> Collection:
        """Create an empty collection in ``folder``, which must not hold one."""
        prepare_folder(folder)
        path = folder / FILE_NAME
        begun = path.with_suffix(".new")
        with _reading(path):
            begun.unlink(missing_ok=True)
            os.close(os.open(begun, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with closing(_connect(begun)) as file:
                file.executescript(TABLES)
                row = (settings.model_dump_json(), fingerprint)
                file.execute("INSERT INTO settings VALUES (?, ?)", row)
            begun.replace(path)
        return cls(folder)

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
        return {source: content_hash for source, content_hash, _ in self._states()}

    def unfinished(self) -> dict[str, int]:
        """Return for each unfinished document, by source, how many chunks lack KV."""
        return {source: count for source, _, count in self._states() if count}

    def counts(self) -> tuple[int, int]:
        """Return how many documents and how many chunks there are."""
        ((documents, chunks),) = self._run(
            "SELECT COUNT(*), IFNULL(SUM(json_array_length(chunks)), 0) FROM documents"
        )
        return documents, chunks

    def note_unfinished(self, source: str, chunks: int) -> None:
        """Record how many chunks of a document lack KV; 0 means none."""
        self._run("UPDATE documents SET unfinished = ? WHERE source = ?", chunks, source)

    def replace(
        self, document: Document, content_hash: str, vectors: Vectors, *, unfinished: int = 0
    ) -> None:
        """Write a document, replacing the one with the same id (its source).

        unfinished: how many of its chunks lack KV that could not be stored. Raises ConfigError when
        the size of its vectors differs from that of the collection's.
        """
        stored = vectors.astype("<f4")
        size = "LENGTH(vectors) / json_array_length(chunks)"
        for (there,) in self._run(f"SELECT {size} FROM documents LIMIT 1"):  # noqa: S608
            if there != stored.strides[0]:
                raise ConfigError(
                    f"embedding model {self.settings.embedding_model!r} is not the one that "
                    f"{self.folder} was indexed with: index with --rebuild"
                )
        row = (document.document_id, content_hash, unfinished, json.dumps(document.chunks))
        self._run("REPLACE INTO documents VALUES (?, ?, ?, ?, ?)", *row, stored.tobytes())

    def remove(self, source: str) -> None:
        """Delete a document, if it exists."""
        self._run("DELETE FROM documents WHERE source = ?", source)

    def load(self) -> tuple[tuple[Document, ...], Vectors]:
        """Read all documents, and a vector for each of their chunks, in order.

        Raises StoreError if there is none, or one is damaged.
        """
        import numpy as np

        found = self._run("SELECT * FROM documents ORDER BY source")
        if not found:
            raise StoreError(f"{self.folder} holds no documents: add some with `index`")
        with self._reading():
            rows = DOCUMENT_ROWS.validate_python(found)
            vectors = [
                np.frombuffer(vectors, "<f4").reshape(len(chunks), -1)
                for *_, chunks, vectors in rows
            ]
            joined = np.concatenate(vectors).astype(np.float32)
            if not joined.size or not np.isfinite(joined).all():
                raise ValueError("a vector holds no numbers")
        return tuple(Document(source, tuple(chunks)) for source, _, _, chunks, _ in rows), joined

    def open_engine(self, given: Mapping[str, Any]) -> Engine:
        """Open the collection's engine; given: as for CollectionSettings.engine_config.

        Raises ConfigError when the model is no longer the one that the collection was indexed with,
        or an engine of another kind.
        """
        engine = open_quietly(self.settings.engine_config(self.folder, given))
        if engine.fingerprint != self.fingerprint:
            engine.close()
            raise ConfigError(
                f"model {self.settings.model!r} is not the one that {self.folder} was indexed with "
                "(its weights or its tokenizer changed, or the engine or the store's precision is "
                "another): index with --rebuild, or give what it was indexed with"
            )
        return engine

    def _states(self) -> list[tuple[str, str, int]]:
        found = self._run("SELECT source, content_hash, unfinished FROM documents ORDER BY source")
        with self._reading():
            return STATE_ROWS.validate_python(found)

    def _run(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement, which is a transaction of its own, and return its rows."""
        with self._reading():
            return self._file.execute(statement, values).fetchall()

    def _reading(self) -> AbstractContextManager[None]:
        return _reading(self.folder / FILE_NAME)


def open_quietly(config: EngineConfig) -> Engine:
    """Open an engine, without what its libraries log."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    quiet_libraries()
    return open_engine(config)


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
    with Collection(folder) as collection:
        return tuple(map(collection.path_of, collection.content_hashes()))


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
    file = connect(path, "rw", WAIT_SECONDS)
    file.text_factory = str
    file.execute("PRAGMA secure_delete = ON")
    return file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise StoreError for errors of SQLite and for malformed rows."""
    try:
        yield
    except CacheBlendError:
        raise
    except (sqlite3.OperationalError, OSError) as error:  # locked, full, gone, not ours to write
        raise StoreError(f"{path} cannot be used: {error}") from error
    except (sqlite3.DatabaseError, ValueError) as error:
        reason = "a row is broken" if isinstance(error, ValidationError) else error
        raise StoreError(
            f"{path} cannot be used ({reason}): make it again with `cacheblend-rag index PATH "
            f"--into {path.parent} --rebuild`"
        ) from error
